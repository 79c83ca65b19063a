"""Planted bugs of the CUDA path: a piece of text, and what it is changed to. In a kernel it
occurs once in the whole source that `ringrt.kernels.load_source` gives for the file. Each must
be caught by the check of its name in tests/cuda_mutant_check.py."""

from __future__ import annotations

from typing import NamedTuple


class KernelMutant(NamedTuple):
    """`check` compiles and runs kernels of the file."""

    name: str
    check: str
    file: str
    old: str
    new: str


class QueueMutant(NamedTuple):
    """A line of what queues the kernels and moves the arrays; `transport` is the one it is run
    with."""

    name: str
    transport: str
    path: str
    old: str
    new: str


_FORWARD = ("tensor_core_forward", "mma_forward.cu")
_STATE = ("tensor_core_forward", "state.cu")
_BACKWARD = ("tensor_core_backward", "mma_backward.cu")
_EXACT = ("exact_forward", "exact_forward.cu")
_EXACT_BACK = ("exact_backward", "exact_backward.cu")
_ROWS = ("rows", "rows.cu")

KERNEL_MUTANTS = [
    # Barriers and asynchronous copies.
    KernelMutant("no barrier before V is overwritten", *_FORWARD, "__syncthreads();  // this K is there (and Q)", "// this K is there (and Q)"),
    KernelMutant("no barrier before V is read", *_FORWARD, "__syncthreads();  // V is there", "// V is there"),
    KernelMutant("does not wait for V", *_FORWARD, "copy_async_wait<1>();", "copy_async_wait<2>();"),
    KernelMutant("does not wait for K", *_FORWARD, "copy_async_wait<0>();\n        __syncthreads();", "copy_async_wait<1>();\n        __syncthreads();"),
    KernelMutant("K has one buffer", *_FORWARD, "load_tile<T, BC, DK, THREADS>(k_tiles + (turn ^ 1) * BC * DK", "load_tile<T, BC, DK, THREADS>(k_tiles + turn * BC * DK"),
    KernelMutant("the state is written while lanes read it", *_FORWARD, "__syncwarp();  // four lanes have read", "// four lanes have read"),
    # Tiles and fragments.
    KernelMutant("one reader without the swizzle", *_FORWARD, "fragment_at<T, D>(tile, lane_offset<D>(lane % 16, lane / 16), k0, 2 * n)", "tile + (k0 + lane % 16) * D + ((n * 2 + lane / 16) << 3)"),
    KernelMutant("chunks added within the swizzle", *_FORWARD, "(lane ^ (bytes & 127))", "(lane + (bytes & 127))"),
    KernelMutant("A in the order of B", *_FORWARD, "lane_offset<D>(lane % 16, lane / 16), row0", "lane_offset<D>(lane % 8 + lane / 16 * 8, lane / 8 % 2), row0"),
    KernelMutant(".trans dropped", *_FORWARD, "ldmatrix_x4_trans(b, fragment_at", "ldmatrix_x4(b, fragment_at"),
    KernelMutant("no zeros beyond dim, 16 bytes at a time", *_FORWARD, "bool ok = row < rows && column < dim;", "bool ok = row < rows;"),
    KernelMutant("from batch to batch in 32 bits", "long_strides", "mma_forward.cu", "q += batch * q_batch + ", "q += batch * (int)q_batch + "),
    # Masks.
    KernelMutant("keys from one too late", *_FORWARD, "max_of(p.k0, i - p.upper)", "max_of(p.k0, i - p.upper + 1)"),
    KernelMutant("keys up to one too few", *_FORWARD, "min_of(p.k1, i - p.lower + 1)", "min_of(p.k1, i - p.lower)"),
    KernelMutant("a whole tile where the last key is hidden", *_FORWARD, "i0 - (j1 - 1) >= p.lower", "i0 - (j1 - 2) >= p.lower"),
    KernelMutant("a whole tile where the first key is hidden", *_FORWARD, "(i1 - 1) - j0 <= p.upper", "(i1 - 2) - j0 <= p.upper"),
    # The state.
    KernelMutant("-inf minus -inf", *_FORWARD, "float shift = now == -INF ? 0.f : now;", "float shift = now;"),
    KernelMutant("z not rescaled", *_FORWARD, "rows.z[m][h] * keep + sum", "rows.z[m][h] + sum"),
    KernelMutant("z of one lane", *_FORWARD, "z += __shfl_xor_sync(~0u, z, 2);", ""),
    KernelMutant("a maximum for each lane", *_FORWARD, "top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));", ""),
    KernelMutant("carried z ignored", *_FORWARD, "z_all[row] * keep[m][h] + z * add[m][h]", "z * add[m][h]"),
    KernelMutant("wrong head of the group", *_FORWARD, "kv_head = head / group;", "kv_head = head % (q_heads / group);"),
    KernelMutant("value_dim for head_dim", *_FORWARD, "here.count(), value_dim, vector & 4", "here.count(), head_dim, vector & 4"),
    KernelMutant("scale dropped", *_FORWARD, "plain ? scale * LOG2E : 1.f", "plain ? LOG2E : 1.f"),
    KernelMutant("a negative scale taken as plain", *_FORWARD, "plain = scale > 0.f && softcap == 0.f", "plain = softcap == 0.f"),
    KernelMutant("softcap dropped", *_FORWARD, "softcap * tanhf(s / softcap)", "s"),
    KernelMutant("empty rows divided by 0", *_STATE, "bool empty = z[at] == STATE(0);", "bool empty = false;"),
    KernelMutant("the sink of another head", *_STATE, "sink[n / rows % q_heads]", "sink[n % q_heads]"),
    # Backward.
    KernelMutant("no barrier before dout is overwritten", *_BACKWARD, "__syncthreads();  // this Q is there", "// this Q is there"),
    KernelMutant("no barrier before lse is read", *_BACKWARD, "__syncthreads();  // dout, lse and delta", "// dout, lse and delta"),
    KernelMutant("Q has one buffer", *_BACKWARD, "q_tiles + (turn ^ 1) * STEP * DK", "q_tiles + turn * STEP * DK"),
    KernelMutant("dk from the first head of the group", *_BACKWARD, "q + ahead.head * q_head + ahead.walk.at", "q + ahead.walk.at"),
    KernelMutant("lse of the first head of the group", *_BACKWARD, "stats + (i64)here.head * rows + at + i", "stats + at + i"),
    KernelMutant("one head of the group", *_BACKWARD, "here(pieces, item, group), ahead", "here(pieces, item, 1), ahead"),
    KernelMutant("delta dropped", *_BACKWARD, "s * (dp - delta) * slope", "s * dp * slope"),
    KernelMutant("slope dropped", *_BACKWARD, "s * (dp - delta) * slope", "s * (dp - delta)"),
    KernelMutant("scale of dq dropped", *_BACKWARD, ", sums, warp_row, item.end, head_dim, scale", ", sums, warp_row, item.end, head_dim, 1.f"),
    KernelMutant("dv scaled", *_BACKWARD, "warp_row, item.end, value_dim, 1.f", "warp_row, item.end, value_dim, scale"),
    KernelMutant("queries up to one too few", *_BACKWARD, "min_of(p.q1, j + p.upper + 1)", "min_of(p.q1, j + p.upper)"),
    # Without tensor cores.
    KernelMutant("exact: no barrier before K is overwritten", *_EXACT, "__syncthreads();  // nobody reads the last K and V", "// nobody reads the last K and V"),
    KernelMutant("exact: no barrier for P", *_EXACT, "__syncwarp();  // the row's probabilities", "// the row's probabilities"),
    KernelMutant("exact: hidden values weighed too", *_EXACT, "if (!(sees[r + i] < T(0)))", ""),
    KernelMutant("exact: z of one lane", *_EXACT, "z * keep + sum_of_lanes<LANES>(sum)", "z * keep + sum"),
    KernelMutant("exact: no barrier for p and ds", *_EXACT_BACK, "__syncwarp();  // the key's p and ds", "// the key's p and ds"),
    KernelMutant("exact: delta dropped", *_EXACT_BACK, "(dot<DV>(dout, v) - delta)", "dot<DV>(dout, v)"),
    KernelMutant("exact: one head of the group", *_EXACT_BACK, "head < (kv_head + 1) * group", "head < kv_head * group + 1"),
    # Between steps.
    KernelMutant("rows picked from the start", *_ROWS, "has_index ? index[i] : start + i", "start + i"),
    KernelMutant("sums overwritten", *_ROWS, "* width + w] += part", "* width + w] = part"),
    KernelMutant("delta of one lane", *_ROWS, "sum += __shfl_xor_sync(~0u, sum, step);\n        if (lane == 0)", ";\n        if (lane == 0)"),
    KernelMutant("sinks of rows that see nothing", *_ROWS, "if (seen[row]) sum -=", "sum -="),
]  # fmt: skip

_NCCL, _STAGED = "ringrt/transports/nccl.py", "ringrt/transports/staged.py"
_EXCHANGE, _LOOP = "ringrt/engine/exchange.py", "ringrt/engine/forward.py"
_LOOP_BACK, _DEVICE = "ringrt/engine/backward.py", "ringrt/device/cuda.py"

QUEUE_MUTANTS = [
    # NCCL.
    QueueMutant("sends before what is sent is ready", "nccl", _NCCL, "self._stream.wait_event(stream.record())", "pass"),
    QueueMutant("compute does not wait for the exchange", "nccl", _NCCL, "self._stream.wait_event(self.end)", "pass"),
    QueueMutant("waits for the wrong event", "nccl", _NCCL, "self._stream.wait_event(self.end)", "self._stream.wait_event(self.begin)"),
    QueueMutant("no groupEnd", "nccl", _NCCL, "self._nccl.groupEnd()", "pass"),
    QueueMutant("no groupStart", "nccl", _NCCL, "self._nccl.groupStart()", "pass"),
    QueueMutant("a receive without its send", "nccl", _NCCL, "(comm.send, sends)", "(comm.send, [])"),
    QueueMutant("wrong peer", "nccl", _NCCL, "kind, m.peer, self._stream.ptr", "kind, (m.peer + 1) % self.size, self._stream.ptr"),
    QueueMutant("sends one element short", "nccl", _NCCL, "count, kind = m.data.nbytes,", "count, kind = m.data.nbytes - (verb == comm.send),"),
    QueueMutant("on the stream of the caller", "nccl", _NCCL, "m.peer, self._stream.ptr)", "m.peer, 0)"),
    QueueMutant("packed rows not kept", "nccl", _NCCL, "self.buffers = buffers", "self.buffers = None"),
    QueueMutant("joins on the wrong device", "nccl", _NCCL, "with self.device.gpu, self._stream, _mapped(self._nccl):", "with self._stream, _mapped(self._nccl):"),
    # By way of the host.
    QueueMutant("copies out before it is ready", "threads", _STAGED, "self.copies.wait_event(stream.record())", "pass"),
    QueueMutant("sends before it is copied out", "threads", _STAGED, "self._wait_for(ready, timeout)", "pass"),
    QueueMutant("pinned memory of one turn", "threads", _STAGED, "key = verb, message, turn\n", "key = verb, message, 0\n"),
    QueueMutant("compute does not wait for the copies in", "threads", _STAGED, "self._stream.wait_event(end)", "pass"),
    QueueMutant("a chunk is left out", "threads", _STAGED, "self._rounds = -(-most // transport.chunk)", "self._rounds = most // transport.chunk"),
    # The loop.
    QueueMutant("one slot for all visitors", "nccl", _EXCHANGE, "slots = {slot: self._buffers_of(count) for slot, count in slot_rows(steps).items()}", "slots = dict.fromkeys((0, 1), self._buffers_of(max(slot_rows(steps).values(), default=0)))"),
    QueueMutant("never waits", "nccl", _EXCHANGE, "ticket.wait(self._run.timeout)", "pass"),
    QueueMutant("computes on what is coming", "nccl", _LOOP, "k_now, v_now = exchange.present(step)", "k_now, v_now = exchange.present(steps[done % len(steps)])"),
    QueueMutant("adds to sums before they are there", "nccl", _LOOP_BACK, "        exchange.wait(step, ticket)\n        leaving = _add_up(step, part, carried, side.sums, run.device)\n", "        leaving = _add_up(step, part, carried, side.sums, run.device)\n        exchange.wait(step, ticket)\n"),
    # The device.
    QueueMutant("the caller's stream not waited for", "nccl", _DEVICE, "self.stream.wait_event(caller.record())", "pass"),
    QueueMutant("the caller's stream does not wait", "nccl", _DEVICE, "caller.wait_event(self.stream.record())", "pass"),
    QueueMutant("results before they are done", "nccl", _DEVICE, "while not self.reached(event):\n            check()", "while False:\n            check()"),
    QueueMutant("the wrong device is current", "nccl", _DEVICE, "with self.gpu:\n            caller", "with contextlib.nullcontext():\n            caller"),
    QueueMutant("pinned memory of an upload not kept", "nccl", _DEVICE, "self._uploads[key] = there, pinned", "self._uploads[key] = there, None"),
    QueueMutant("uploads on another stream", "nccl", _DEVICE, "pinned.ptr, x.nbytes, self.stream)", "pinned.ptr, x.nbytes, self._cupy.cuda.Stream.null)"),
]  # fmt: skip
