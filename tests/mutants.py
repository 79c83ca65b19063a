"""Planted bugs: a line of the product, and what it is changed to. Each must be caught by the
short run of tests/mutant_check.py, which passes on the product as it is."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """`old` occurs once in the file."""

    name: str
    path: str
    old: str
    new: str


PLAN, ENGINE = "ringrt/plan/", "ringrt/engine/"
TILES, SCHEDULE, NEEDS = PLAN + "tiles.py", PLAN + "schedule.py", PLAN + "needs.py"
OPTIONS, ROWS = PLAN + "mask_options.py", PLAN + "rows.py"
STATE, REFERENCE = "ringrt/softmax_state.py", "backends/ringrt_backends/reference.py"
EXCHANGE, BACKWARD = ENGINE + "exchange.py", ENGINE + "backward.py"
HOST = "ringrt/device/host.py"

MUTANTS = [
    # Bands and tiles.
    Mutant("band one too low", TILES, "_ceil_div(low - apart, stride) - shift)", "_ceil_div(low - apart, stride) - shift - 1)"),
    Mutant("band one too high", TILES, "_floor_div(high - apart, stride) - shift)", "_floor_div(high - apart, stride) - shift + 1)"),
    Mutant("floor for ceiling", TILES, "return -_floor_div(-value, divisor)", "return _floor_div(value, divisor)"),
    Mutant("trim drops the last row", TILES, "rows, keys = np.minimum(n, m + upper), np.minimum(m, n - lower)\n    shift", "rows, keys = np.minimum(n, m + upper) - 1, np.minimum(m, n - lower)\n    shift"),
    Mutant("trim forgets to move the band", TILES, "shift = first_row - first_key", "shift = 0 * first_key"),
    Mutant("full where one pair is hidden", TILES, "low <= -(keys - first_key - 1)", "low <= -(keys - first_key - 2)"),
    Mutant("second run starts at 0", TILES, "base += run.count", "base += 0"),
    Mutant("compact keys shifted twice", TILES, "table[:, column] = moved", "table[:, column] = moved + (moved > 0)"),
    # Masks.
    Mutant("top-left for bottom-right", OPTIONS, "shift = q_stop - k_stop", "shift = q_start - k_start"),
    Mutant("window one too wide", OPTIONS, "shift + left", "shift + left + 1"),
    Mutant("causal dropped beside a window", OPTIONS, "right = 0 if right is None else min(right, 0)", "right = 0 if right is None else right"),
    Mutant("sinks ignore causality", OPTIONS, "sinks = (q_start, q_stop, first, second, low, free)", "sinks = (q_start, q_stop, first, second, -free, free)"),
    Mutant("prefix of one too many", OPTIONS, "first = np.minimum(k_start + self.prefix, k_stop)", "first = np.minimum(k_start + self.prefix + 1, k_stop)"),
    # Schedule and needs.
    Mutant("last step dropped", SCHEDULE, "count = self.size + 1 if grads else self.size", "count = self.size if grads else self.size - 1"),
    Mutant("wrong slot", SCHEDULE, "slot = self._slot(index)\n        rows", "slot = HOME if index == 0 else index % 2\n        rows"),
    Mutant("wrong owner", SCHEDULE, "def _owner(self, index: int) -> int:\n        return (self.rank - index) % self.size", "def _owner(self, index: int) -> int:\n        return (self.rank + index) % self.size"),
    Mutant("own needs only, nothing handed on", SCHEDULE, "rows = self.needs[shard].beyond(following)", "rows = self.needs[shard].at(following)"),
    Mutant("sum goes home too soon", SCHEDULE, "onward = self.ring and before < self.needs[shard].last", "onward = self.ring and before < self.needs[shard].last - 1"),
    Mutant("carried sum forgotten", SCHEDULE, "if not self.ring or not 2 <= index < self.size:", "if not self.ring or not 3 <= index < self.size:"),
    Mutant("needs one row short", NEEDS, "return Rows.where(self.edges, self.needed[distance])", "return Rows.where(self.edges[:-1], self.needed[distance][:-1])"),
    Mutant("nearest ranks forgotten", NEEDS, "return Rows.where(self.edges, self._until[distance])", "return Rows.where(self.edges, self._until[distance - 1])"),
    Mutant("packed rows out of place", ROWS, "moved: IntArray = before[which] + index - starts[which]", "moved: IntArray = before[which] + index - starts[which] + (which > 0)"),
    Mutant("bytes of the sums miscounted", PLAN + "problem.py", "return row * ITEMSIZE[self.state_dtype]", "return row * ITEMSIZE[self.dtype]"),
    Mutant("values miscounted", PLAN + "problem.py", "row = self.batch * self.kv_heads * (self.head_dim + self.value_dim)\n        return row * ITEMSIZE[self.dtype]", "row = self.batch * self.kv_heads * 2 * self.head_dim\n        return row * ITEMSIZE[self.dtype]"),
    # State.
    Mutant("merge without the identity", STATE, "xp.where(old == -np.inf, xp.zeros_like(old), xp.exp(old - new))", "xp.exp(old - new)"),
    Mutant("old maximum kept", REFERENCE, "softmax.m[...] = m", "softmax.m[...] = softmax.m"),
    Mutant("sum not rescaled", REFERENCE, "softmax.z[...] = softmax.z * keep", "softmax.z[...] = softmax.z"),
    Mutant("lse in base 2", STATE, "self.m + xp.log(divisor)", "self.m + xp.log2(divisor)"),
    Mutant("empty rows divided by", STATE, "divisor = xp.where(empty, 1, self.z)", "divisor = self.z"),
    Mutant("empty rows get a finite lse", STATE, "xp.where(empty, -np.inf, self.m", "xp.where(empty, -1e30, self.m"),
    Mutant("sink without its weight", STATE, "state.z[:, head] = logit != -np.inf", "state.z[:, head] = 0"),
    Mutant("what is hidden leaks as NaN", REFERENCE, "product[:, :, rows] +=", "product[:, :, :] += 0 * stray[:, :, None, :]\n        product[:, :, rows] +="),
    # Engine.
    Mutant("sink added at every step", ENGINE + "forward.py", "        exchange.wait(step, ticket)\n", "        if sink is not None:\n            state.softmax.z[...] += 1\n        exchange.wait(step, ticket)\n"),
    Mutant("always the home shard", EXCHANGE, "return self._lying_in(step.slot, step.rows)", "return self._home"),
    Mutant("sends what it should not", EXCHANGE, "source = self._home if at_home else self._lying_in(step.slot, step.rows)", "source = self._home if at_home or step.index == 2 else self._lying_in(step.slot, step.rows)"),
    Mutant("received bytes counted as sent", EXCHANGE, "self._stats.bytes_sent += sum([message.data.nbytes for message in sends])", "self._stats.bytes_sent += moves.incoming"),
    Mutant("block-local delta", HOST, "delta[..., seen].astype(np.float64)).sum", "(1 + delta[..., seen]).astype(np.float64)).sum"),
    Mutant("block-local lse in backward", REFERENCE, "p = np.where(counted, np.exp(scores - lse), 0)", "p = np.where(counted, np.exp(scores - np.log(np.sum(np.where(counted, np.exp(scores), 0), axis=-1, keepdims=True) + 1e-300)), 0)"),
    Mutant("delta left out", REFERENCE, "p * (dp - delta) * slope", "p * dp * slope"),
    Mutant("slope of the softcap left out", REFERENCE, "return problem.softcap * tanh, problem.scale * (1 - tanh**2)", "return problem.softcap * tanh, problem.scale"),
    Mutant("carried sums dropped", BACKWARD, "device.add_rows(total, step.carry.rows.within(step.sums), carried[index], _ALL)", "pass"),
    Mutant("carried sums counted twice", BACKWARD, "if step.carry and total is not carried[index]:", "if step.carry:"),
    Mutant("a kept pass sends its first home shard", EXCHANGE, "step.send.slot != HOME and step.send.rows == step.rows", "step.send.rows == step.rows"),
    Mutant("own part dropped", BACKWARD, "        if part:\n            to, rows", "        if part and not step.carry:\n            to, rows"),
    Mutant("dk and dv swapped at home", BACKWARD, "return dk, dv\n\n    def finish", "return dv, dk\n\n    def finish"),
    Mutant("what comes home overwrites", BACKWARD, "device.add_rows(total, step.home.rows.within(Rows.all(total.shape[1])), more, _ALL)", "total[:, step.home.rows.within(Rows.all(total.shape[1]))] = more"),
    Mutant("KV of the first step throughout", BACKWARD, "part = side.compute(exchange.present(step), step", "part = side.compute(exchange.present(steps[0]), step"),
    Mutant("sinks counted in rows without keys", HOST, "part: Array = -(np.exp(shift)", "part: Array = -2 * (np.exp(shift)"),
]  # fmt: skip
