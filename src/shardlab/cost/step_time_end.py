"""What ends a step on a rank: gradients summed over the data axis, the optimizer, weights gathered again."""

from __future__ import annotations

from typing import NamedTuple

from .step_time_axes import Group, Sent, sent
from .step_time_layers import Layers
from .step_time_pass import Pass

STEPPED = 28  # bytes a parameter: AdamW reads gradient, weight or master, two moments, and writes all but the first


class End(NamedTuple):
    """Seconds of the data axis that nothing hides, and of the optimizer; what the rank sends over the data axis, and
    for gradients of a tied embedding."""

    data: float
    optimizer: float
    sent: Sent


def ending(layers: Layers, held: Pass, microbatches: int, table: bool = False) -> End:
    """Of a rank whose stages are `held` together, one micro-batch of each. `table` says whether it has a tied embedding
    that another stage has too.

    A row of gradients is sent while the rest of backward goes on: once a step, in the last micro-batch; under ZeRO-2
    and 3 in each. ZeRO-3 gathers weights while the layer before computes. ZeRO-1 and 2 gather after the step, when
    there is nothing to hide behind. Spread experts are summed over the ranks that have the same ones, not shared out
    (`parallel.zero`). The norm's few bytes are left out.
    """
    layout, width, groups = layers.layout, layers.width, layers.groups
    rest, spread = held.rest * width, held.spread * width
    forward, backward = (layers.speeds.overlap * seconds for seconds in (held.forward, held.input + held.weight))
    op = "reduce_scatter" if layout.zero else "all_reduce"
    sums, gather = sent(op, rest, groups["data"]), sent("all_gather", rest / layout.data_ranks, groups["data"])
    experts = sent("all_reduce", spread, groups["edp"])
    seconds = {name: layers.seconds(what) for name, what in (("sums", sums), ("gather", gather), ("experts", experts))}
    if layout.zero < 2:
        data, moved = max(0.0, seconds["sums"] + seconds["experts"] - backward), sums.plus(experts)
    else:
        ahead = gather if layout.zero == 3 else Sent()
        wait = seconds["gather"] if layout.zero == 3 else 0.0
        each = max(0.0, seconds["sums"] + wait - backward) + max(0.0, wait - forward)
        data = microbatches * each + max(0.0, seconds["experts"] - backward)
        moved = sums.plus(ahead).plus(ahead).times(microbatches).plus(experts)
    if layout.zero in (1, 2):
        data, moved = data + seconds["gather"], moved.plus(gather)
    if table:
        end = sent("all_reduce", layers.table * width, Group(2, 2 if groups["pp"].domains == 1 else 1))
        data, moved = data + layers.seconds(end), moved.plus(end)
    stepped = held.rest / (layout.data_ranks if layout.zero else 1) + held.spread
    return End(data, STEPPED * stepped / layers.memory, moved)
