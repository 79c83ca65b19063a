"""The CUDA simulator: capture, and the launch of graphs."""

from __future__ import annotations

import numpy as np
import pytest
from cudasim_support import (
    fresh,  # noqa: F401
    ones,
    pinned,
    scale,
    two_streams,
)

from ringrt import cudasim
from ringrt.cudasim import SimulatorError, StreamRace, api as cp
from ringrt.cudasim.runtime import CUDARuntimeError

pytestmark = pytest.mark.timeout(60)


def captured():
    """A graph of y = 2 x, z = 3 y with z computed on a forked stream."""
    stream, fork = two_streams()
    with stream:
        x, y, z = (cp.zeros(8, np.float32) for _ in range(3))
    fork.wait_event(stream.record())
    stream.begin_capture()
    assert stream.is_capturing()
    scale(x, y, 2, stream)
    fork.wait_event(stream.record())
    assert fork.is_capturing()
    scale(y, z, 3, fork)
    stream.wait_event(fork.record())
    graph = stream.end_capture()
    assert not stream.is_capturing()
    assert not fork.is_capturing()
    return stream, graph, x, y, z


def test_a_graph_runs_at_every_launch():
    stream, graph, x, _y, z = captured()
    assert not z.get(stream).any()
    for value in (1, 5):
        with stream:
            x.fill(value)
        graph.upload(stream)
        graph.launch(stream)
        np.testing.assert_array_equal(z.get(stream), np.full(8, 6 * value, np.float32))
    with stream:
        graph.launch()
        graph.launch()
    stream.synchronize()


def test_a_launch_is_checked_for_races():
    stream, graph, _x, _y, z = captured()
    other = cp.cuda.Stream(non_blocking=True)
    stream.synchronize()
    with other:
        z.fill(0)
    with pytest.raises(StreamRace, match="kernel scale .* not ordered after fill"):
        graph.launch(stream)
    cudasim.reset()
    stream.wait_event(other.record())
    graph.launch(stream)
    with other, pytest.raises(StreamRace):
        z.fill(0)
    other.wait_event(stream.record())
    with other:
        z.fill(0)


def test_launches_of_one_graph_do_not_overlap():
    stream, graph, *arrays = captured()
    other = cp.cuda.Stream(non_blocking=True)
    other.wait_event(stream.record())
    graph.launch(stream)
    graph.launch(other)
    other.synchronize()
    for array in arrays:
        assert not array.get(other).any()


def test_a_captured_array_must_not_be_freed():
    stream, graph, _x, y, _z = captured()
    stream.synchronize()
    del y
    with pytest.raises(SimulatorError, match="has been freed since the capture"):
        graph.launch(stream)


def test_races_inside_a_capture():
    stream, fork = two_streams()
    with stream:
        x, y = cp.zeros(8, np.float32), cp.zeros(8, np.float32)
    stream.begin_capture()
    event = stream.record()
    scale(x, y, 2, stream)
    fork.wait_event(event)
    with pytest.raises(StreamRace, match="kernel scale"):
        scale(y, x, 2, fork)
    stream.wait_event(fork.record())
    stream.end_capture()


def test_what_a_capture_does_not_allow():
    stream, other = two_streams()
    outside = other.record()
    with stream:
        x = cp.zeros(8, np.float32)
    event = stream.record()
    stream.begin_capture(2)
    event.record(stream)
    for act, text in (
        (stream.synchronize, "StreamCaptureUnsupported"),
        (lambda: stream.done, "StreamCaptureUnsupported"),
        (cp.cuda.Device().synchronize, "StreamCaptureUnsupported"),
        (event.synchronize, "CapturedEvent"),
        (lambda: event.done, "CapturedEvent"),
        (lambda: stream.wait_event(outside), "StreamCaptureIsolation"),
        (lambda: x.set(np.zeros(8, np.float32), stream), "not pinned"),
        (lambda: x.get(stream), "not pinned"),
        (lambda: cp.empty(3), "allocation during capture"),
        (stream.begin_capture, "IllegalState"),
        (other.end_capture, "IllegalState"),
    ):
        with pytest.raises(CUDARuntimeError, match=text):
            act()
    stream.end_capture()
    for act in (event.synchronize, lambda: other.wait_event(event)):
        with pytest.raises(CUDARuntimeError, match="CapturedEvent"):
            act()
    with pytest.raises(RuntimeError, match="default \\(legacy\\) stream"):
        cp.cuda.Stream.null.begin_capture()
    stream.synchronize()


def test_forked_streams_must_be_joined():
    stream, fork = two_streams()
    with stream:
        x = cp.zeros(8, np.float32)
    stream.begin_capture()
    fork.wait_event(stream.record())
    with fork:
        x.fill(1)
    with pytest.raises(CUDARuntimeError, match="the capture began on"):
        fork.end_capture()
    with pytest.raises(CUDARuntimeError, match="StreamCaptureUnjoined"):
        stream.end_capture()
    assert not fork.is_capturing()


def test_the_null_stream_and_the_capture_of_a_blocking_stream():
    stream = cp.cuda.Stream()
    x = ones()
    stream.begin_capture()
    with pytest.raises(CUDARuntimeError, match="StreamCaptureImplicit"):
        x.fill(1)
    stream.end_capture()
    x.fill(1)


def test_a_captured_download_is_poisoned_at_each_launch():
    stream, _ = two_streams()
    with stream:
        x = cp.zeros(8, np.float32)
    out = pinned()
    out[:] = 1
    stream.begin_capture()
    x.get(stream, out=out, blocking=False)
    graph = stream.end_capture()
    assert (out == 1).all()
    for _ in range(2):
        graph.launch(stream)
        assert np.isnan(out).all()
        stream.synchronize()
        assert not out.any()
