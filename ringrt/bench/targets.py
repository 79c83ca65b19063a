"""What is to be reached, and where each figure comes from. Nothing else in the bench knows one.

Times of PyTorch over ours, and of whatever else is compared, are ratios, which travel from one
machine to another far better than times do. Where a vector unit, or PyTorch, differs from those of
the machine named here, a target may be out of reach, or no merit.
"""

from __future__ import annotations

from dataclasses import dataclass

_ZEN4 = "PyTorch 2.13 over prototypes of the kernels on two cores of AMD Zen 4 (AVX-512)"
_RING = "the ring's own demands"


@dataclass(frozen=True, slots=True)
class Target:
    """A figure to be reached from below (`at_least`) or from above. `source` says where it comes
    from. It counts for sequences of `from_length` tokens or more: a short call is mostly Python's
    and the threads' own time."""

    limit: float
    source: str
    at_least: bool = True
    from_length: int = 0

    def reached(self, value: float) -> bool:
        """Whether a figure is good enough."""
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}"


def _kernel(limit: float, measured: str) -> Target:
    return Target(limit, f"{_ZEN4}: {measured}", from_length=1024)


def _gloo(limit: float) -> Target:
    return Target(limit, "the kernel's targets; in both passes weighted by their work", True, 4096)


def _at_most(limit: float, source: str, from_length: int = 0) -> Target:
    return Target(limit, source, False, from_length)


#: By name. A name that ends in " d128" is for heads of 128 or more, where it differs.
TARGETS = {
    "forward float32 full": _kernel(1.2, "1.21 to 1.32"),
    "forward float32 full d128": _kernel(1.15, "1.17 to 1.19"),
    "forward float32 causal": _kernel(1.3, "1.29 to 1.48"),
    "forward float32 causal d128": _kernel(1.25, "1.26 to 1.31"),
    "backward float32 full": _kernel(1.3, "1.34 to 1.44"),
    "backward float32 full d128": _kernel(1.25, "1.27 to 1.30"),
    "backward float32 causal": _kernel(1.45, "1.46 to 1.59"),
    "backward float32 causal d128": _kernel(1.4, "1.39 to 1.46"),
    "forward bfloat16 full": _kernel(2.2, "2.20 to 2.38"),
    "forward bfloat16 causal": _kernel(2.4, "2.31 to 2.63"),
    "backward bfloat16 full": _kernel(2.0, "no prototype: PyTorch's float32 time, halved"),
    "backward bfloat16 causal": _kernel(2.0, "no prototype: PyTorch's float32 time, halved"),
    "narrow against float32": Target(
        0.97, "half the bytes are no reason to be slower; 3 % for noise", from_length=1024
    ),
    "best of the limit": Target(88.0, "prototypes on AMD Zen 4: 88 to 92 % of multiply-adds"),
    "cold start, warm cache": _at_most(3.0, "what a person waits without wondering"),
    "cold start, empty cache": _at_most(15.0, "once for each installation"),
    "memory": _at_most(2.2, "twice the tokens, twice the memory, and a tenth for noise"),
    "one rank": _at_most(1.02, f"{_RING}: nothing to move, so nothing to pay", 4096),
    "two ranks": Target(0.95, f"{_RING}: the cores compute, whoever they belong to", True, 4096),
    "striped": Target(1.25, "causal work on two ranks, 3/4 to 1/2, is 1.5 to 1", True, 4096),
    "step": _at_most(100.0, f"{_RING}: 1/400 of a step of 1,024 rows, 8 heads of 128"),
    "quarter pieces": _at_most(1.05, f"{_ZEN4}: up to 1.05 from pieces of 1,024 keys on", 4096),
    "eighth pieces": _at_most(1.10, f"{_ZEN4}: 1.01 to 1.10 for pieces of 512 keys", 4096),
    "GQA": Target(0.98, "fewer bytes of K,V are no reason to be slower; 2 % for noise", True, 4096),
    "proportional": _at_most(1.10, "time by visible pairs, and a tenth for the band's edges", 8192),
    "gloo forward full": _gloo(1.2),
    "gloo forward full d128": _gloo(1.15),
    "gloo forward causal": _gloo(1.3),
    "gloo forward causal d128": _gloo(1.25),
    "gloo both full": _gloo(1.27),
    "gloo both full d128": _gloo(1.22),
    "gloo both causal": _gloo(1.4),
    "gloo both causal d128": _gloo(1.35),
}


def target(name: str, head_dim: int = 0) -> Target:
    """The target of that name, for heads of that size."""
    wide = f"{name} d128"
    return TARGETS[wide if head_dim >= 128 and wide in TARGETS else name]
