"""Calls of a backend's kernels ahead of time, for those that are compiled when first called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringrt.plan.mask import UNBOUNDED
from ringrt.plan.problem import Problem
from ringrt.plan.tiles import Tile

if TYPE_CHECKING:
    from ringrt_flash_attn.backend import FlashAttnBackend

#: Rows and keys of a block: several blocks of the kernels, as in earnest.
ROWS = 512


def kinds(problem: Problem) -> list[Tile]:
    """A tile for each kind of window that the problem's mask can give: none, and the bounds that
    its pieces have. One that ends at a row's own place (causal) is a kind by itself."""
    low, high = problem.mask.table[:, 4], problem.mask.table[:, 5]
    bounds = [(-UNBOUNDED, UNBOUNDED)]
    below, above = bool((low != -UNBOUNDED).any()), bool((high != UNBOUNDED).any())
    if below:
        bounds += [(0, UNBOUNDED), (-1, UNBOUNDED)]
    if above:
        bounds += [(-UNBOUNDED, 1)]
    if below and above:
        bounds += [(-1, 1)]
    return [Tile(0, ROWS, 0, ROWS, lower, upper) for lower, upper in bounds]


def warm(backend: FlashAttnBackend, problem: Problem, tiles: list[Tile]) -> None:
    """Both passes of each tile."""
    zeros, shape = backend.arrays.zeros, (problem.batch, ROWS)
    q = zeros((*shape, problem.q_heads, problem.head_dim), problem.dtype)
    k = zeros((*shape, problem.kv_heads, problem.head_dim), problem.dtype)
    v = zeros((*shape, problem.kv_heads, problem.value_dim), problem.dtype)
    for tile in tiles:
        out, lse = backend.block(q, k, v, tile, problem)
        backend.block_backward(q, k, v, out, lse, out, tile, problem)
