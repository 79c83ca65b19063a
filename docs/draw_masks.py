"""Draw the pictures of docs/masks.md: each mask under each partition, by `ringrt plan --draw`.

python docs/draw_masks.py [folder]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from click.testing import CliRunner

from ringrt.cli.main import cli

MASKS = {
    "full": "{}",
    "causal": "{causal: true}",
    "window": "{window: [4, 1]}",
    "documents": "{causal: true, documents: [0, 9, 14, 24]}",
    "prefix": "{causal: true, prefix: 6}",
    "sinks": "{causal: true, window: [4, 0], sink_tokens: 2}",
}
PARTITIONS = ("contiguous", "striped", "zigzag")
JOB = """
input: {{source: random, length: 24, q_heads: 1, kv_heads: 1, head_dim: 8}}
attention: {mask}
ring: {{ranks: 3, partition: {partition}}}
"""


def main(folder: Path) -> None:
    """Write folder/MASK-PARTITION.svg for each."""
    with tempfile.TemporaryDirectory() as temporary:
        job = Path(temporary) / "job.yaml"
        for name, mask in MASKS.items():
            for partition in PARTITIONS:
                job.write_text(JOB.format(mask=mask, partition=partition))
                picture = folder / f"{name}-{partition}.svg"
                done = CliRunner().invoke(cli, ["plan", str(job), "--draw", str(picture)])
                if done.exit_code:
                    raise SystemExit(done.output)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "masks")
