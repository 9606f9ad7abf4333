"""What the data axis holds and sends: ZeRO's stages by its paper, by DeepSpeed's code and pages, by Megatron-LM's."""

from dataclasses import replace

from facts import GB, GIB, ROWS, SEVENTY, stored
from facts_sizes import year

from shardlab.cost import memory, traffic
from shardlab.specs import Layout

PAPER = [f"B1-{name}" for name in (
    "7.5B-N1-z1", "7.5B-N4-z1", "7.5B-N4-z3", "7.5B-N16-z1", "7.5B-N64-z1", "7.5B-N64-z2", "7.5B-N64-z3",
    "7.5B-N256-z2", "7.5B-N1024-z1", "7.5B-N1024-z2", "7.5B-N1024-z3",
    "128B-N64-z1", "128B-N64-z2", "128B-N64-z3", "128B-N1024-z1",
    "1000B-N64-z2", "1000B-N64-z3", "1000B-N1024-z1", "1000B-N1024-z2", "1000B-N1024-z3")]


def each(stage, ranks, gradients="bf16"):
    """Bytes of a model's states for each parameter, but for AdamW's few step counters; gradients as the paper's."""
    layout = Layout(dp=ranks, zero=stage) if ranks > 1 else Layout()
    bill = memory(SEVENTY, layout, "bf16", training=True, master="fp32", gradients=gradients)
    return (bill.held - bill.steps) / SEVENTY.total


def of_paper(name):
    """Gigabytes of a model known by a round number of parameters."""
    inputs = ROWS[name]["inputs"]
    return inputs["P"] * each(inputs["st"], inputs["N"]) / GB


def endless(stage):
    """Bytes for each parameter that no number of ranks makes fewer: what is left if half is taken away for ever."""
    return 2 * each(stage, 16) - each(stage, 8)


def sent(stage):
    """Bytes that each of eight ranks sends in a step for one more layer."""
    deep, less = (traffic(replace(SEVENTY, layers=layers), Layout(dp=8, zero=stage), 1, 1, "bf16") for layers in (9, 8))
    return deep.wire() - deep.wire(phase="finish") - less.wire() + less.wire(phase="finish")


COMPUTED = {
    **{name: lambda name=name: of_paper(name) for name in PAPER},
    "A000-zero2-comm": lambda: sent(2) / sent(0),
    "A000-zero3-comm": lambda: sent(3) / sent(0),
    "A000-year-zero": lambda: year("rajbhandari2020zero"),
    "A003-zero3-fit": lambda: 120 * memory(SEVENTY, Layout(dp=2, zero=3)).weights / memory(SEVENTY).weights,
    "B1-distopt": lambda: each(1, 8, "fp32"),
    "B1-asymptote1": lambda: each(0, 1) / endless(1),
    "B1-asymptote2": lambda: each(0, 1) / endless(2),
    "D-ds-zero2-paper": lambda: 2851e6 * each(2, 8) / GIB,
    # its code keeps a rank's gradients twice, in fp16 and in fp32
    "D-ds-zero2-code": lambda: (2851e6 * each(2, 8, "fp32") + stored(2851e6, "fp16") / 8) / GIB,
    # eight processes of a node, each with a whole copy in fp32, and half as much again for what comes beside it
    "D-ds-zero2-cpu": lambda: 1.5 * 8 * stored(10e9, "fp32") / GB,
    # beside what is shared out, the largest layer's weights and gradients, whole
    "D-ds-zero3-doc": lambda: (2851e6 * each(3, 8, None) + 2 * stored(32e6, "fp16")) / GIB,
    "D-ds-4527": lambda: (6805e6 * each(3, 4, None) + 2 * stored(131e6, "fp16")) / GIB,
}
