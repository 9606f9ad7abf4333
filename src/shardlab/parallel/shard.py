"""Equal slices of a dim, padded where it does not divide, and their inverse.

Rank r of p holds rows r·c to (r+1)·c of the dim, c = ⌈n/p⌉. Rows past n are padding: zeros, held so that all ranks have
the same shapes, and never saved. A rank may hold padding only (n = 5, p = 4: c = 2, rank 3 holds none of the 5).
"""

from __future__ import annotations

import torch
from torch import nn

from ..model.parameters import Window
from ..specs import padded


def window(n: int, p: int, r: int, dim: int) -> Window:
    """The rows of `n` along `dim` that slice `r` of `p` holds: `stop - start` of them, its other rows are padding."""
    c = padded(n, p) // p
    return Window(dim=dim, start=min(r * c, n), stop=min((r + 1) * c, n), full=n)


def take(tensor: torch.Tensor, window: Window, size: int) -> torch.Tensor:
    """The part of the whole `tensor` in `window`, padded with zeros to `size` rows along the window's dim: a copy."""
    shape = list(tensor.shape)
    shape[window.dim] = size
    held = window.stop - window.start
    out = tensor.new_empty(shape) if held == size else tensor.new_zeros(shape)
    out.narrow(window.dim, 0, held).copy_(tensor.narrow(window.dim, window.start, held))
    return out


def shard(tensor: torch.Tensor, p: int, r: int, dim: int = 0) -> torch.Tensor:
    """Slice `r` of `p` of `tensor` along `dim`, padded to equal size: a copy."""
    n = tensor.shape[dim]
    return take(tensor, window(n, p, r, dim), padded(n, p) // p)


def unshard(shards: list[torch.Tensor], n: int, dim: int = 0) -> torch.Tensor:
    """The inverse: the whole tensor, `n` rows along `dim`, from the slices of all ranks in their order."""
    return torch.cat(shards, dim).narrow(dim, 0, n)


def parameter(whole: torch.Tensor, window: Window, size: int) -> nn.Parameter:
    """The part of `whole` in `window` as a parameter, frozen if that was; `checkpoint.load` asks for its window."""
    part = nn.Parameter(take(whole.detach(), window, size), requires_grad=whole.requires_grad)
    part.window = window  # type: ignore[attr-defined]
    return part
