"""In which order a cut sequence lies on its ranks: in zigzag, so that causal attention costs each of them the same.

In pieces one after the other the first rank's tokens would attend to few keys and the last rank's to all, and all would
wait for the last. So the sequence is 2p chunks, and rank r has chunks r and 2p − 1 − r: what the one spares, the other
costs (Llama 3, arXiv:2407.21783, §3.3.2). With p = 3, and 12 tokens:

    rank 0    0  1          10 11
    rank 1       2  3     8  9
    rank 2          4  5  6  7

Tokens, labels, positions and what says which of them are there go through the one `share`, and `join` is its inverse:
an order of its own for any of them is wrong without a word.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..comm.regions import gather_from
from ..specs import padded


def places(n: int, p: int) -> torch.Tensor:
    """Which tokens of a sequence of `n` each of `p` ranks has, in its order: (p, tokens a rank). Those from n on are
    padding, up to a multiple of 2p, which stands behind a rank's other tokens."""
    first, second = torch.arange(padded(n, 2 * p)).view(2, p, -1)
    return torch.cat((first, second.flip(0)), 1)


def share(x: torch.Tensor, group: dist.ProcessGroup, fill: float | bool,
          dim: int = -1) -> torch.Tensor:
    """This rank's tokens of `x`, the same on all ranks, whose `dim` is the sequence:
    (…, seq) → (…, tokens a rank).

    Padding is `fill`. A copy.
    """
    n, p = x.shape[dim], group.size()
    mine = places(n, p)[group.rank()].to(x.device)
    after = [0, 0] * (x.dim() - 1 - dim % x.dim())
    whole = F.pad(x, [*after, 0, padded(n, 2 * p) - n], value=fill)
    return whole.index_select(dim, mine)


def join(x: torch.Tensor, group: dist.ProcessGroup, n: int, dim: int = 1) -> torch.Tensor:
    """The inverse: the `n` tokens of the sequence along `dim`, from what each rank has of them, without padding.

    (…, tokens a rank, …) → (…, n, …), the same on all ranks, which must go on to use it in the same way: its gradient
    is whole on each (`regions.gather_from`).
    """
    back = places(n, group.size()).flatten().argsort()[:n].to(x.device)
    return gather_from(x, group, dim).index_select(dim, back)
