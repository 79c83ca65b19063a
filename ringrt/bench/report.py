"""The result as a file of JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ringrt.bench.cases import Settings
from ringrt.bench.measurement import Measurement, passed
from ringrt.errors import ConfigError

#: Of the layout of the file.
_VERSION = 1


def check_writable(option: str, path: Path) -> None:
    """`ConfigError` now, and not when all has been measured."""
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(option, "a file that can be written", error.strerror) from None


def to_json(machine: dict[str, Any], settings: Settings, rows: Sequence[Measurement]) -> str:
    """Everything: the machine, what was asked, and each row with the seconds of every call."""
    record = {
        "ringrt bench": _VERSION,
        "machine": machine,
        "settings": asdict(settings),
        "passed": passed(rows),
        "rows": [row.to_json() for row in rows],
    }
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"


def from_json(text: str) -> list[Measurement]:
    """The rows of such a file."""
    return [Measurement.from_json(row) for row in json.loads(text)["rows"]]
