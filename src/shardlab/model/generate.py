"""Greedy generation: always the likeliest next token, so that two runs can be compared token for token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .cache import KVCache

if TYPE_CHECKING:
    from .transformer import Transformer


@torch.no_grad()
def greedy(
    model: Transformer, tokens: torch.Tensor, new_tokens: int, stop: int | None = None, cached: bool = True
) -> torch.Tensor:
    """tokens (batch, seq) → (batch, seq + up to new_tokens): the prompt, and what the model makes of it.

    With `stop`, a sequence that has made that token goes on repeating it, and generation ends when all have, if the
    model `ends_early`. Without `cached`, every step computes all tokens again: the plain meaning, which the KV cache
    must not change.
    """
    if new_tokens < 0:
        raise ValueError(f"new_tokens must be 0 or more, not {new_tokens}")
    batch, seq = tokens.shape
    if batch == 0 or seq == 0:
        raise ValueError(f"a prompt needs at least one token: tokens have shape ({batch}, {seq})")
    cache = KVCache(len(model.layers), seq + new_tokens) if cached else None
    unread, done = tokens, torch.zeros(batch, 1, dtype=torch.bool, device=tokens.device)
    for _ in range(new_tokens):
        last = model.hidden(unread, cache=cache)[:, -1:]
        new = model.lm_head(last).argmax(-1)
        if stop is not None:
            new = new.where(~done, stop)
            done |= new == stop
        tokens = torch.cat((tokens, new), 1)
        unread = new if cached else tokens
        if done.all() and model.ends_early:
            break
    return tokens
