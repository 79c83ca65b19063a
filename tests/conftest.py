from __future__ import annotations

import os

from hypothesis import settings

# Tolerances are those of sums in fp32, on every machine; what multiplies bf16 in pairs has tests
# of its own. Before anything asks which code the machine runs, and for subprocesses too.
os.environ.setdefault("RINGRT_CPU_WITHOUT", "avx512bf16")

# Examples draw whole rings of threads; a deadline an example would only measure the machine.
settings.register_profile("ringrt", deadline=None, max_examples=60)
settings.load_profile("ringrt")
