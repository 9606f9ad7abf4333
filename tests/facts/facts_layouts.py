"""What layouts of several axes are: how many ranks they have, and what the order of their axes does."""

from facts import SEVENTY

from shardlab.cost import step_time
from shardlab.specs import ClusterSpec, Layout

PUBLISHED = Layout(pp=16, dp=128, ep=64, zero=1, microbatches=120)  # DeepSeek-V3's


def step(order):
    """Seconds of a step of 64 × 8,192 tokens on eight servers of eight, with the axes in that order."""
    layout = Layout(tp=8, pp=4, dp=2, zero=1, sp="again", microbatches=32, order=order)
    return step_time(SEVENTY, layout, ClusterSpec.of("h100", 64), batch=1, seq=8192).seconds


COMPUTED = {
    "A9-ep-product": lambda: PUBLISHED.world_size,
    "A9-rank-order": lambda: step("tp-pp-dp") / step("pp-dp-tp"),
}
