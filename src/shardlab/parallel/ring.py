"""Ring attention: the queries stay, keys and values go round (Liu et al., arXiv:2310.01889).

Each rank has the queries, keys and values of some tokens, in `zigzag` order. In p steps the keys and values of all
ranks come by, one rank's at a time, and the next are under way while those at hand are computed with. What a softmax
over some of the keys gives is brought together with what is there by the log of the sums of exponentials (`lse`):

    lse' = log(exp lse + exp lse_block)      out' = out · exp(lse − lse') + out_block · exp(lse_block − lse')

which is exact, and no rank ever has more than two ranks' keys. With p ranks, a layer sends from each rank

    forward     (p − 1) × its k and v
    backward    (p − 1) × its k and v, once more, and (p − 1) × their gradients, in float32 at least

KV heads are sent as they are, not once for each query head that reads them; latent attention's are those of all heads,
projected up, and many times the latent. The gradients follow their keys, one step behind, each rank adding its own, and
the last hands them home.

Of a causal block that comes from rank j, rank r needs (chunks of `zigzag`, c tokens each):

    j = r     the triangle of its own 2c tokens
    j < r     j's first chunk, which is before both of r's; the second is after both          2c queries × c keys
    j > r     all of j, for r's second chunk; the first is before both of j's                  c queries × 2c keys

so after the first step, which is alike on all ranks too, each does the same work in every step, and half of what
attention that is not causal costs.

The partial results of 16-bit inputs are added up in float32 (`out`, `lse`, and all gradients): rounded at each step
their error would grow with the ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ..comm import P2POp, batch_isend_irecv
from .zigzag import places

Tensors = Sequence[torch.Tensor]
TILE = 256  # queries whose scores are in memory at a time


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None, *, group: dist.ProcessGroup,
           causal: bool = True, length: int | None = None) -> torch.Tensor:
    """Softmax(scale · q kᵀ) v over the keys of all ranks of the group: what `model.attention.attend` gives for the
    whole, of it this rank's tokens.

    q (batch, heads, own, d), k (batch, kv_heads, own, d), v (batch, kv_heads, own, e) → (batch, heads, own, e), with
    equally many tokens on all ranks, in the order of `zigzag.places`. `scale` is 1/√d by default. `length` is the
    sequence's without padding, all of it by default: padding attends to nothing, which gives zeros, and nothing to it.
    Every rank calls it, and goes through its backward. Raises ValueError where queries and keys are not of the same
    tokens, and on an odd number of them, which is not two chunks.
    """
    p, own, of_rank = group.size(), q.shape[2], k.shape[2]
    if not own == of_rank == v.shape[2]:
        raise ValueError(f"each of a rank's tokens has a query, a key and a value, and here are {own}, {of_rank} and "
                         f"{v.shape[2]}: a cut sequence has no KV cache")
    if p > 1 and own % 2:
        raise ValueError(f"{own} tokens a rank are not two chunks of the same size: cut the sequence by zigzag.share")
    length = p * own if length is None else length
    real = [length] if p == 1 else (places(p * own, p) < length).sum(1).tolist()
    return _Ring.apply(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, group, causal, real)


class _Ring(torch.autograd.Function):
    """`real`: how many of each rank's tokens are no padding, which is behind them."""

    @staticmethod
    def forward(ctx, q, k, v, scale, group, causal, real):
        k, v, dtype = k.contiguous(), v.contiguous(), torch.promote_types(q.dtype, torch.float32)
        queries = _grouped(q, k.shape[1]).to(dtype) * scale
        out = queries.new_zeros(*queries.shape[:-1], v.shape[-1])
        lse = queries.new_full((*queries.shape[:-1], 1), -torch.inf)
        for source, (keys, values) in _round((k, v), group):
            keys, values = keys.to(dtype), values.to(dtype)
            tiles = _tiles(group.rank(), source, q.shape[2], real, causal)
            for rows, n, hidden in tiles:
                scores = _scores(_rows(queries, rows), keys[:, :, :n], hidden)
                block = scores.logsumexp(-1, keepdim=True)
                given = scores.sub_(block).exp_() @ values[:, :, :n]
                given, block = _apart(given, rows), _apart(block, rows)
                before = lse[..., rows, :].clone()
                lse[..., rows, :] = both = torch.logaddexp(before, block)
                out[..., rows, :] *= (before - both).exp()
                out[..., rows, :] += given * (block - both).exp()
        # in the order that the next matrix reads: else it would be kept in both
        out = out.flatten(1, 2).to(q.dtype)
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how = scale, group, causal, real
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        scale, group, causal, real = ctx.how
        r, heads, dtype = group.rank(), k.shape[1], lse.dtype
        queries, grad = _grouped(q, heads).to(dtype) * scale, _grouped(grad, heads).to(dtype)
        inner = (grad * _grouped(out, heads)).sum(-1, keepdim=True)  # Σ over keys of probability · its gradient
        dq, came, home = torch.zeros_like(queries), None, list[torch.Tensor]()
        for source, (keys, values) in _round((k, v), group):
            keys, values = keys.to(dtype), values.to(dtype)
            dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
            tiles = _tiles(r, source, q.shape[2], real, causal)
            for rows, n, hidden in tiles:
                some, given = _rows(queries, rows), _rows(grad, rows)
                scores = _scores(some, keys[:, :, :n], hidden)
                probabilities = scores.sub_(_rows(lse, rows)).exp_()
                dv[:, :, :n] += probabilities.mT @ given
                ds = (given @ values[:, :, :n].mT).sub_(_rows(inner, rows))
                ds.mul_(probabilities)
                dq[..., rows, :] += _apart(ds @ keys[:, :, :n], rows)
                dk[:, :, :n] += ds.mT @ some
            if source == r:
                home = [dk, dv]
            else:
                mine = [dk, dv] if came is None else _added([dk, dv], came())
                came = _pass_on(mine, group, "gradients")
        if came is not None:
            home = _added(home, came())
        dk, dv = home
        return (dq * scale).flatten(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _round(own: Tensors, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensors]]:
    """(A rank, its tensors), of all ranks, this one's first: the next are under way
    while a caller has those."""
    r, p, held = group.rank(), group.size(), own
    for step in range(p):
        coming = _pass_on(held, group, "keys and values") if step < p - 1 else None
        yield (r - step) % p, held
        if coming is not None:
            held = coming()


def _added(mine: Tensors, came: Tensors) -> list[torch.Tensor]:
    """The sums, in the place of `mine`."""
    return [x.add_(y) for x, y in zip(mine, came, strict=True)]


def _pass_on(tensors: Tensors, group: dist.ProcessGroup, what: str) -> Callable[[], list[torch.Tensor]]:
    """Start to send these to the next rank, and to receive such from the one before; gives what waits for them."""
    ranks, r, p = dist.get_process_group_ranks(group), group.rank(), group.size()
    room = [torch.empty_like(x) for x in tensors]
    handles = batch_isend_irecv([P2POp("isend", x, ranks[(r + 1) % p], group, what) for x in tensors]
                                + [P2POp("irecv", x, ranks[(r - 1) % p], group, what) for x in room])

    def arrived() -> list[torch.Tensor]:
        for handle in handles:
            handle.wait()
        return room

    return arrived


def _tiles(r: int, source: int, own: int, real: Sequence[int], causal: bool
           ) -> Iterator[tuple[slice, int, torch.Tensor | None]]:
    """(Queries of rank r, the number of keys of `source` that they attend to, its first ones, and which of these scores
    to leave out, if any), some queries at a time."""
    first, keys = 0, real[source]
    if causal and source < r:
        keys = min(keys, own // 2)
    if causal and source > r:
        first = own // 2
    for start in range(first, real[r] if keys else first, TILE):
        stop, seen, hidden = min(start + TILE, real[r]), keys, None
        if causal and source == r:
            seen = stop
            hidden = torch.ones(stop - start, seen, dtype=torch.bool).triu(start + 1)
        yield slice(start, stop), seen, hidden


def _scores(q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    """q kᵀ, new memory: q (batch, kv_heads, sharers · n, d), k (batch, kv_heads, m, d), hidden (n, m)."""
    scores = q @ k.mT
    if hidden is not None:
        scores.unflatten(2, (-1, len(hidden))).masked_fill_(hidden.to(q.device), -torch.inf)
    return scores


def _grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """(batch, heads, own, d) → (batch, kv_heads, sharers of a KV head, own, d)."""
    return x.unflatten(1, (kv_heads, -1))


def _rows(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """Some queries of all sharers of a KV head, as the rows of one matrix: (batch, kv_heads, sharers · n, d)."""
    return x[..., rows, :].flatten(2, 3)


def _apart(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """The inverse: (batch, kv_heads, sharers, n, d)."""
    return x.unflatten(2, (-1, rows.stop - rows.start))
