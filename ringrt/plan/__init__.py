"""Pure data: what is computed (problem, mask), where it lies (partition), and in which steps
(tiles, schedule, cost). Imports NumPy and nothing heavier; knows no device and no transport."""

from ringrt.plan.choose import plan
from ringrt.plan.mask import Mask, Piece
from ringrt.plan.partition import PARTITIONS, Partition, Run
from ringrt.plan.problem import Problem
from ringrt.plan.schedule import HOME, Hop, Plan, Step
from ringrt.plan.tiles import Tile, TileTable

__all__ = [
    "HOME",
    "PARTITIONS",
    "Hop",
    "Mask",
    "Partition",
    "Piece",
    "Plan",
    "Problem",
    "Run",
    "Step",
    "Tile",
    "TileTable",
    "plan",
]
