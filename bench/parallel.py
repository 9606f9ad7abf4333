"""One step of training on several ranks: our cuts beside PyTorch's own, all on the same model, batch and optimizer.

A Llama of 26 million parameters in fp32, 8 × 256 tokens, AdamW, one thread a rank. The reference is one process with
two threads, which knows nothing of ranks. The ways of a block take turns, a step each, so that what disturbs one
disturbs all; what is shown is the median over the turns of a way's time, the slowest rank's, ÷ that of the reference
(or of PyTorch's own) in the same turn. Exits with an error where the losses of all ways do not agree.

    python bench/parallel.py [ranks …] [--gloo] [--turns N] [--only WAY]      2 ranks, over shm, 10 turns when left out

That takes 10 minutes; the results in bench/results are those of `python bench/parallel.py 2 4 --gloo`, which takes 35.
With `--only 1F1B` the block that has it runs alone.
"""

from __future__ import annotations

import argparse
import os

import torch
from ways.turns import conclude, disagreeing, head, measured, shown

BLOCKS = [  # PyTorch's own, and those of ours that do the same
    {"DDP": ["DP"], "ZeroRedundancyOptimizer": ["ZeRO-1"]},
    {"FSDP2, kept": ["ZeRO-2"], "FSDP2": ["ZeRO-3"]},
    {"DTensor TP": ["TP"], "DTensor TP+SP": ["TP+SP keep", "TP+SP again"]},
    {"pipelining GPipe": ["GPipe"], "pipelining 1F1B": ["1F1B", "zero bubble"],
     "pipelining interleaved": ["interleaved"]},
]
AIMS = {"DP": 1.06, "ZeRO-1": 1.06, "ZeRO-2": 1.10, "ZeRO-3": 1.10, "TP": 1.10, "TP+SP keep": 1.12,
        "TP+SP again": 1.12}  # time ÷ the reference's on 2 ranks over shm, at most
OF_PEERS = {"GPipe": 0.95, "1F1B": 0.9, "interleaved": 0.95}  # time ÷ PyTorch's own on 2 ranks; of all others 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", nargs="*", type=int, default=[2])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--gloo", action="store_true", help="ours over gloo too")
    parser.add_argument("--only", help="the block with this way of ours")
    asked = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's, which says when it starts and stops
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start; "
          f"medians of {asked.turns} steps\n")
    print(head())
    missed, wrong = [], []
    for p in asked.ranks:
        for block in BLOCKS:
            if asked.only and asked.only not in [name for names in block.values() for name in names]:
                continue
            print(f"{p} ranks, load {os.getloadavg()[0]:.1f}", flush=True)
            ways = measured(block, p, asked.turns, asked.gloo)
            missed += shown(ways, p, *((AIMS, OF_PEERS) if p == 2 else ({}, {})))
            wrong += disagreeing(ways)
    conclude(missed, wrong)


if __name__ == "__main__":
    main()
