"""Holds `flash_signatures.py` to sources of FlashAttention. Not a test: it needs a source tree.

    python tests/check_flash_signatures.py TREE [TREE ...]

where a TREE is an unpacked sdist of flash-attn, an unpacked wheel of flash-attn-4, or a clone of
the repository. Prints one line for each function found below it and exits 1 if any differs.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from flash_signatures import RECORDS, Record


def read(source: Path, name: str) -> tuple[str, str]:
    """A function's parameters and what it returns last, as a `Record` holds them."""
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            returned = [each for each in ast.walk(node) if isinstance(each, ast.Return)]
            last = max(returned, key=lambda each: each.lineno).value
            several = isinstance(last, ast.Tuple)
            parts = map(ast.unparse, last.elts) if several else [ast.unparse(last)]
            return _parameters(node.args), ", ".join(parts)
    raise LookupError(f"{source} holds no function {name}")


def _parameters(arguments: ast.arguments) -> str:
    """`q, k, causal=False`."""
    names = [each.arg for each in arguments.args]
    defaults = [f"={ast.unparse(each)}" for each in arguments.defaults]
    padded = [""] * (len(names) - len(defaults)) + defaults
    return ", ".join(map("".join, zip(names, padded, strict=True)))


def compare(record: Record, source: Path) -> list[str]:
    """One line for each function of the record."""
    if record.version == 4 and not (source.parent / "flash_bwd_sm100.py").is_file():
        return [f"{source}: an early copy, which the plugin does not take for version 4"]
    lines = []
    for name, recorded in record.functions.items():
        found = read(source, name)
        verdict = "as recorded" if found == recorded else f"differs: {found}"
        lines.append(f"{source}: {name}: {verdict}")
    return lines


def main(trees: list[str]) -> int:
    """The exit code."""
    lines = []
    for tree in map(Path, trees):
        sources = {record.file for record in RECORDS if (tree / record.file).is_file()}
        if not sources:
            lines.append(f"{tree}: differs: holds none of the recorded files")
        for file in sorted(sources):
            found = [compare(each, tree / file) for each in RECORDS if each.file == file]
            # Of one file there may be records of several releases; the nearest one counts.
            lines += min(found, key=lambda each: sum("differs" in line for line in each))
    print("\n".join(lines))
    return int(not trees or any("differs" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
