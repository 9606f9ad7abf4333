"""One step of training on 4 ranks whose model is cut along two axes: ours beside PyTorch's own.

dp2·tp2 beside FSDP2 + DTensor, with weights that are gathered for each layer (ZeRO-3); tp2·pp2 beside DTensor +
torch.distributed.pipelining, 1F1B of 8 micro-batches. Model, batch, optimizer, turns and columns are those of
parallel.py: ranks of one thread each, ours over shm. Exits with an error where the losses of all ways do not agree.

    python bench/layouts.py [--gloo] [--turns N] [--only WAY]      4 turns when left out

With `--only tp2·pp2` the block that has it runs alone.
"""

from __future__ import annotations

import argparse
import os

import torch
from ways.turns import conclude, disagreeing, head, measured, shown

RANKS = 4
BLOCKS = [  # PyTorch's own, and ours that does the same
    {"FSDP2 · TP": ["dp2·tp2"], "FSDP2 · TP+SP": ["dp2·tp2, SP"]},
    {"TP · 1F1B": ["tp2·pp2"], "TP+SP · 1F1B": ["tp2·pp2, SP"]},
]
AIM = 0.85  # of the time of PyTorch's own, at most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--gloo", action="store_true", help="ours over gloo too")
    parser.add_argument("--only", help="the block with this way of ours")
    asked = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's, which says when it starts and stops
    print(f"torch {torch.__version__}, {RANKS} ranks on {os.cpu_count()} cores; medians of {asked.turns} steps; aim: "
          f"{AIM} of the time of PyTorch's own\n\n{head()}")
    missed, wrong = [], []
    for block in BLOCKS:
        ours = [name for names in block.values() for name in names]
        if asked.only and asked.only not in ours:
            continue
        print(f"load {os.getloadavg()[0]:.1f}", flush=True)
        ways = measured(block, RANKS, asked.turns, asked.gloo)
        missed += shown(ways, RANKS, {}, dict.fromkeys(ours, AIM))
        wrong += disagreeing(ways)
    conclude(missed, wrong)


if __name__ == "__main__":
    main()
