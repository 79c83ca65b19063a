"""The parts of benchmarks/gpu_acceptance.py."""
