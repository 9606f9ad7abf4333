"""Experts on many ranks: how many ranks, nodes and copies, and what each rank holds."""

from facts import GB, V3, V4, model

from shardlab.cost import memory
from shardlab.cost.parameters import parameters_of
from shardlab.specs import ClusterSpec, Layout
from shardlab.specs.placement import place

TRAINING = Layout(dp=128, ep=64)
PREFILL, DECODE = Layout(4, dp=8, ep=32, etp=1), Layout(4, dp=80, ep=320, etp=1)


def slots(redundant, ranks):
    """Experts of a layer that each rank of V3's has, so many of all being copies; their load is even."""
    placed = place([1.0] * V3.experts.routed, ranks, V3.experts.routed + redundant)
    return len(placed.slots[0])


def experts(spec, layout):
    """Experts of its last layer that a rank has."""
    own = f"layers.{spec.layers - 1}.mlp.experts."
    return len({each.name.split(".")[4] for each in parameters_of(spec, layout) if each.name.startswith(own)})


def ranks(layout, redundant=0):
    layout.check(V3, redundant)
    return layout.world_size


COMPUTED = {
    "A000-edp": lambda: TRAINING.expert_replicas,
    "A000-ep-nodes": lambda: ClusterSpec.of("h800", TRAINING.ep).domains,
    "A000-ep320": lambda: ClusterSpec.of("h800", ranks(DECODE, 64)).cards,
    "B9-v3-decode-attn": lambda: ranks(DECODE, 64),
    "B9-v3-decode-exp-bytes": lambda: memory(V3, DECODE, "fp8", redundant=64).stored["experts"] / GB,
    "B9-v3-prefill-attn": lambda: ranks(PREFILL, 32),
    "B9-v3-prefill-gpus": lambda: ClusterSpec.of("h800", ranks(PREFILL, 32)).cards,
    "B9-svc-prefill": lambda: slots(32, 32),
    "B9-svc-decode": lambda: slots(32, 144),
    "D-megatron-4050": lambda: memory(model("mixtral-8x7b"), Layout(dp=8, ep=8)).elements["experts"] / 1e9,
    "D-aic-1390": lambda: experts(V4, Layout(dp=8, ep=8)),
}
