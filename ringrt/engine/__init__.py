"""The only place that moves K,V and calls kernels: it executes a plan."""
