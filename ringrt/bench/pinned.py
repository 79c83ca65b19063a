"""`python -P pinned.py CORES MODULE ...`: run a module bound to some cores. Run as a file and
without imports of ours, for NumPy's own threads start as it is imported."""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    """Bind this process, then be the module. No cores: do not bind."""
    cores, module = sys.argv[1:3]
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
