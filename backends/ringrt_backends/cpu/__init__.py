"""Attention on the cores of the host: tiles of compiled vector code, and plain Numba where there
is none. `backend` is what ringrt calls; `tile` explains how the time is spent."""
