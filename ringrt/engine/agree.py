"""Before data moves: every rank says what it is about to do, and all must say the same.

A wrong call on one rank is then one clear error on every rank, in place of a hang or a wrong
result.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ringrt.errors import RankMismatch, TransportError
from ringrt.transport import Transport

Record = Mapping[str, Any]

_ENCODER = json.JSONEncoder(sort_keys=True)


def agree(transport: Transport, record: Record, timeout: float) -> list[Record]:
    """Exchange records; raise `RankMismatch` on every rank unless all fields agree. The field
    `local` may differ. Returns every rank's record."""
    return said(say(transport, record, timeout))


def say(transport: Transport, record: Record, timeout: float) -> list[bytes]:
    """Exchange records; what every rank said, to be read by `said`. What has been said before need
    not be read again."""
    return gather(transport, _ENCODER.encode(record).encode(), timeout)


def said(raw: Sequence[bytes]) -> list[Record]:
    """Every rank's record; raises as `agree`."""
    records = [json.loads(item) for item in raw]
    _raise_if_failed(records)
    _raise_if_different(records)
    return records


def gather(transport: Transport, payload: bytes, timeout: float) -> list[bytes]:
    """Every rank's payload. If some rank does not come, those that did and those that come
    late all raise."""
    try:
        return transport.all_gather_bytes(payload, timeout)
    except TransportError as error:
        transport.abort(str(error))
        raise


def tell_failure(transport: Transport, error: Exception, timeout: float) -> None:
    """Take this rank's part in the round, to say that its own arguments are wrong. The others
    raise `RankMismatch` with the reason; the caller goes on to raise its own error."""
    # If the round fails, the others are in trouble of their own; this rank's error is still
    # the one that it reports.
    with contextlib.suppress(TransportError):
        gather(transport, json.dumps({"failure": str(error)}).encode(), timeout)


def agree_ready(
    transport: Transport, record: Record, failure: Exception | None, timeout: float
) -> None:
    """After each rank has prepared itself (plan, backend): raise unless all are ready, and alike
    in the fields of `record`. A rank that is not ready raises its own error."""
    mine = {"failure": str(failure)} if failure else record
    raw = gather(transport, json.dumps(mine).encode(), timeout)
    if failure:
        raise failure
    records = [json.loads(item) for item in raw]
    _raise_if_failed(records)
    _raise_if_different(records)


def _raise_if_different(records: Sequence[Record]) -> None:
    for field in _fields(records):
        values = {rank: each.get(field, "(absent)") for rank, each in enumerate(records)}
        if any(value != values[0] for value in values.values()):
            raise RankMismatch(field, values)


def _raise_if_failed(records: Sequence[Record]) -> None:
    failed = {r: each["failure"] for r, each in enumerate(records) if "failure" in each}
    if failed:
        values = {rank: failed.get(rank, "fine") for rank in range(len(records))}
        raise RankMismatch("whether the call is right", values)


def _fields(records: Sequence[Record]) -> list[str]:
    """All fields, the operation first: where it differs, the rest is bound to."""
    names = sorted({name for each in records for name in each} - {"local"})
    return sorted(names, key=lambda name: name != "operation")
