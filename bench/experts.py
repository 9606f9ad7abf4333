"""A layer of experts, forward and backward, in one process: ours beside `transformers`' own block.

Qwen3-MoE's block with 8 experts of 768 hidden units and with 64 of 96, two a token, 2,048 tokens of 512 numbers, fp32,
one thread and two. The two take turns; what is shown is the median over the turns of ours ÷ theirs. Theirs runs in each
of the ways that `transformers` has for it on a CPU. Exits with an error where outputs or gradients do not agree.

    python bench/experts.py [--turns N]      30 turns when left out, half a minute
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median

import torch
import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from shardlab.model.moe import MoE
from shardlab.model.router import Routing, Rules
from shardlab.specs import ModelSpec
from shardlab.specs.experts import Experts

AIM = 1.1
HIDDEN, TOKENS, ACTIVE = 512, 2048, 2
CASES = {8: 768, 64: 96}  # experts: hidden units of each
WAYS = ("eager", "grouped_mm")  # batched_mm, its third, copies an expert for each token: 6 GB here


def blocks(experts: int, ffn: int, way: str) -> tuple[MoE, torch.nn.Module]:
    """Ours and theirs, of the same weights."""
    spec = ModelSpec(hidden=HIDDEN, layers=1, heads=8, kv_heads=8, head_dim=64, ffn=ffn, vocab=8,
                     experts=Experts(routed=experts, active=ACTIVE, ffn=ffn))
    config = transformers.Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=experts, num_experts_per_tok=ACTIVE,
                                         moe_intermediate_size=ffn, norm_topk_prob=True)
    config._experts_implementation = way
    theirs = Qwen3MoeSparseMoeBlock(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.05, generator=generator)
        ours = MoE(spec, Rules())
        ours.gate.weight.copy_(theirs.gate.weight)
        for i, expert in enumerate(ours.experts.values()):
            gate, up = theirs.experts.gate_up_proj[i].chunk(2)
            expert.gate_proj.weight.copy_(gate)
            expert.up_proj.weight.copy_(up)
            expert.down_proj.weight.copy_(theirs.experts.down_proj[i])
    return ours, theirs


def turn(block: torch.nn.Module, x: torch.Tensor, y_grad: torch.Tensor) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Seconds of forward and backward, the output, and the gradient of the input."""
    x = x.clone().requires_grad_()
    block.zero_grad()
    start = time.perf_counter()
    routing = [Routing(block.gate, torch.ones(TOKENS, dtype=torch.bool))] if isinstance(block, MoE) else []
    y = block(x, *routing)
    y.backward(y_grad)
    taken = time.perf_counter() - start
    assert x.grad is not None
    return taken, y.detach(), x.grad


def compare(experts: int, way: str, turns: int) -> tuple[float, float, float]:
    """Median seconds of ours, of theirs, and of ours ÷ theirs. Raises RuntimeError where they disagree."""
    both = blocks(experts, CASES[experts], way)
    generator = torch.Generator().manual_seed(1)
    x, y_grad = torch.randn(2, 1, TOKENS, HIDDEN, generator=generator)
    times: list[list[float]] = [[], []]
    for number in range(turns + 2):
        done = [turn(block, x, y_grad) for block in both]
        for kind, a, b in zip(("outputs", "gradients"), done[0][1:], done[1][1:], strict=True):
            if not torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max())):
                raise RuntimeError(f"{experts} experts, {way}: the {kind} disagree")
        if number >= 2:
            for each, (taken, *_) in zip(times, done, strict=True):
                each.append(taken)
    return median(times[0]), median(times[1]), median(a / b for a, b in zip(*times, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    turns = parser.parse_args().turns
    print(f"torch {torch.__version__}, transformers {transformers.__version__}; medians of {turns} turns\n")
    print("experts  threads  theirs          ours    theirs   ÷ theirs   aim")
    missed = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for experts in CASES:
            for way in WAYS:
                ours, theirs, ratio = compare(experts, way, turns)
                print(f"{experts:7}  {threads:7}  {way:10} {ours * 1e3:6.1f} ms {theirs * 1e3:6.1f} ms {ratio:10.2f} "
                      f"{AIM:5}")
                if ratio > AIM:
                    missed.append(f"{experts} experts, {threads} threads: {ratio:.2f} of transformers' {way}")
    print("\n" + ("over the aim:\n" + "\n".join(missed) if missed else "no aim is missed"))
    sys.exit(0)


if __name__ == "__main__":
    main()
