"""Ways in which arrays come to a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ringrt.conformance.checks import expect
from ringrt.conformance.oracle import Array
from ringrt.device import Device

#: Brings a host array to the device, in some layout.
Put = Callable[[Device, Array], Array]


def place(device: Device, x: Array) -> Array:
    """A contiguous copy."""
    return device.place(np.array(x, order="C"))


def layouts(device: Device) -> Iterator[tuple[str, Put]]:
    """Those that arrays of such a device can have, by name."""
    yield "heads first", _transposed(0, 2, 1, 3)
    yield "rows first", _transposed(1, 0, 2, 3)
    yield "elements first", _transposed(3, 2, 0, 1)
    yield "cut out of larger arrays", _cut_out
    if device.kind == "cpu":
        yield "backwards", _backwards
        yield "read-only", _read_only


class Keeping:
    """A `Put` that keeps what it has placed, to see afterwards that nobody wrote to it."""

    def __init__(self) -> None:
        self._kept: list[tuple[Device, Array, Array]] = []

    def __call__(self, device: Device, x: Array) -> Array:
        placed = place(device, x)
        self._kept.append((device, placed, x.copy()))
        return placed

    def hold(self, what: object) -> None:
        """`Failed` if anything was written to."""
        for device, placed, before in self._kept:
            with device.running():
                now = device.to_host(placed, before.dtype.name)
            text = f"an input of shape {before.shape} was written to; for {what}"
            expect(now.tobytes() == before.tobytes(), text)


def _transposed(*order: int) -> Put:
    """Lying in another order of axes."""

    def put(device: Device, x: Array) -> Array:
        back = tuple(np.argsort(order))
        return device.place(np.ascontiguousarray(x.transpose(order))).transpose(back)

    return put


def _cut_out(device: Device, x: Array) -> Array:
    """Every other row, and some heads and elements, of a larger array of NaN."""
    batch, rows, heads, dim = x.shape
    large = np.full((batch + 1, 2 * rows + 1, heads + 2, dim + 3), np.nan).astype(x.dtype)
    cut = (slice(1, None), slice(1, None, 2), slice(1, -1), slice(2, -1))
    large[cut] = x
    return device.place(large)[cut]


def _backwards(device: Device, x: Array) -> Array:
    """With negative strides."""
    return np.ascontiguousarray(x[:, ::-1, :, ::-1])[:, ::-1, :, ::-1]


def _read_only(device: Device, x: Array) -> Array:
    placed = np.array(x, order="C")
    placed.flags.writeable = False
    return placed
