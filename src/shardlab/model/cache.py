"""Keys and values kept from earlier tokens, so that a new token costs one token's work."""

from __future__ import annotations

from collections.abc import Callable

import torch


class LayerCache:
    """One layer's keys and values, (batch, kv_heads, tokens so far, head_dim) each, in room for `capacity` tokens.

    Or what they are computed from: latent attention keeps its latent for one and the key that all heads share for the
    other, (batch, 1, tokens so far, kv_rank) and (…, rope_dim). The room is taken at the first append, when the shapes
    are known: a rank that holds fewer heads takes less.
    """

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add k and v, (batch, kv_heads, new tokens, head_dim) each, which may differ in the last; return all so far,
        as views.

        Raises ValueError where they don't fit, or where autograd would want them back.
        """
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError("a KV cache keeps no gradients: use it under torch.no_grad(), and no cache to train")
        batch, heads, new, _ = k.shape
        if self.keys is None or self.values is None:
            self.keys, self.values = (x.new_empty(batch, heads, self.capacity, x.shape[-1]) for x in (k, v))
        if batch != self.keys.shape[0]:
            raise ValueError(f"the cache holds a batch of {self.keys.shape[0]}, not of {batch}: use a new one")
        stop = self.length + new
        if stop > self.capacity:
            raise ValueError(f"the cache has room for {self.capacity} tokens, {self.length} taken: {new} don't fit")
        for store, x in ((self.keys, k), (self.values, v)):
            store[:, :, self.length : stop] = x
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attend: Callable[..., torch.Tensor]
               ) -> torch.Tensor:
        """Add k and v, and what `attend(q, k, v)` makes of q with all that is held then. What a layer asks of a cache:
        others may keep keys and values elsewhere, and several requests in a batch of one (`serve.pages`)."""
        return attend(q, *self.append(k, v))


class KVCache:
    """The caches of all `layers` of a model, each with room for `capacity` tokens a sequence."""

    def __init__(self, layers: int, capacity: int):
        self.layers = [LayerCache(capacity) for _ in range(layers)]

    @property
    def length(self) -> int:
        """Tokens held so far: also the position of the next one."""
        return self.layers[0].length

    @property
    def nbytes(self) -> int:
        """Bytes of the room taken, filled or not."""
        held = (x for layer in self.layers for x in (layer.keys, layer.values) if x is not None)
        return sum(x.nbytes for x in held)
