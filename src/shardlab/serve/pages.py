"""The tensors behind a block table: keys and values in blocks, written token by token and read back by request.

A model's layers see a cache as ever. The batch that they see is one sequence of all requests' new tokens, one after the
other; attention alone has to know where each begins, and gets for each the keys and values that its table names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..model.latent import LatentAttention
from ..model.transformer import Transformer
from ..specs.check import whole
from .batch import Batch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8, "fp64": torch.float64}


@dataclass(frozen=True)
class KVLayout:
    """What a rank's blocks hold: of `layers`, the KV heads `heads` of the model's `total_heads`, each with `key` and
    `value` numbers a token. Of latent attention one "head": the latent, and the shared key.

    `total_heads` is the model's own. With more ranks than KV heads several ranks hold the same one, and what a rank
    holds does not tell how many there are.
    """

    layers: range
    heads: range
    total_heads: int
    key: int
    value: int
    block_size: int = 16
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"a cache of {self.dtype!r}: use one of {', '.join(DTYPES)}")
        whole("block_size", self.block_size)

    @classmethod
    def of(cls, model: Transformer, block_size: int = 16, dtype: str | None = None) -> KVLayout:
        """The layout of what `model`, plain or cut over a tensor axis and a pipeline, caches on this rank; `dtype` None
        is the model's own. Raises ValueError where a rank has several stages of a pipeline, or none, and where the
        sequence is cut."""
        if hasattr(model, "context"):
            raise ValueError("this model's sequence is cut, and its attention goes round a ring, which knows no cache: "
                             "serve the plain model, or one that is cut by heads, stages or experts")
        spec, layers = model.spec, _layers(model)
        attention = next(iter(model.layers.values() if isinstance(model.layers, torch.nn.ModuleDict)
                              else model.layers)).self_attn
        group = getattr(attention, "group", None)
        rank, p = (group.rank(), group.size()) if group is not None else (0, 1)
        if dtype is None:
            own = next(model.parameters()).dtype
            dtype = next((name for name, known in DTYPES.items() if known == own), str(own))
        if isinstance(attention, LatentAttention):
            latent = attention.latent
            return cls(layers, range(1), 1, latent.kv_rank, latent.rope_dim, block_size, dtype)
        return cls(layers, heads_of(rank, p, spec.kv_heads), spec.kv_heads, spec.head_dim, spec.head_dim, block_size,
                   dtype)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in one layer: numbers of one byte come with a scale of two for each key and each value."""
        each = DTYPES[self.dtype].itemsize
        scales = 2 * 2 if self.dtype == "int8" else 0
        return len(self.heads) * ((self.key + self.value) * each + scales)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        return self.token_bytes * self.block_size * len(self.layers)


def heads_of(rank: int, p: int, total: int) -> range:
    """Which of `total` KV heads are rank `rank`'s of a tensor axis of `p`; with more ranks than heads, neighbours have
    the same one."""
    first = rank * total // p
    return range(first, first + max(1, total // p))


def _layers(model: Transformer) -> range:
    if not isinstance(model.layers, torch.nn.ModuleDict):
        return range(len(model.layers))
    here = [int(name) for name in model.layers]
    if len(model.pipeline.mine) != 1 or not here:  # type: ignore[union-attr]
        raise ValueError(f"this rank has layers {here} in {len(model.pipeline.mine)} stages: serving "  # type: ignore
                         "wants one stage with layers on each rank, a schedule without chunks")
    return range(here[0], here[-1] + 1)


class Store:
    """Keys or values of one layer: `data` (blocks, heads, block_size, width), and for int8 a scale each in `scale`
    (blocks, heads, block_size, 1), bf16: one for each token and head, whose sizes differ."""

    def __init__(self, layout: KVLayout, width: int, blocks: int, device: torch.device | None = None):
        shape = (blocks, len(layout.heads), layout.block_size)
        # zeros: what is not yet written may be read, and masked; a NaN would come through
        self.data = torch.zeros(*shape, width, dtype=DTYPES[layout.dtype], device=device)
        self.scale = torch.zeros(*shape, 1, dtype=torch.bfloat16, device=device) if layout.dtype == "int8" else None

    def put(self, blocks: torch.Tensor, offsets: torch.Tensor, x: torch.Tensor) -> None:
        """Write x (heads, tokens, width), each token at its offset in its block."""
        x = x.transpose(0, 1)
        if self.scale is not None:
            x, scale = quantise(x)
            self.scale[blocks, :, offsets] = scale
        self.data[blocks, :, offsets] = x.to(self.data.dtype)

    def read(self, blocks: torch.Tensor, offsets: torch.Tensor, heads: slice) -> list[torch.Tensor]:
        """What is held of these tokens, as it is held: (tokens, heads, width), and the scales where there are any."""
        return [held[blocks, heads, offsets] for held in (self.data, self.scale) if held is not None]

    def write(self, blocks: torch.Tensor, offsets: torch.Tensor, heads: slice, parts: list[torch.Tensor]) -> None:
        """Put what `read` gave, elsewhere or here."""
        for held, part in zip((self.data, self.scale), parts, strict=False):
            assert held is not None
            held[blocks, heads, offsets] = part.to(held.device)

    def get(self, tables: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What is in the blocks of `tables` (requests, blocks): (requests, heads, blocks · block_size, width)."""
        x = self.data[tables]
        x = x.to(dtype) if self.scale is None else x.to(dtype) * self.scale[tables].to(dtype)
        return x.transpose(1, 2).flatten(2, 3)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers from −127 to 127 and, for each row of the last dim, the scale that they are multiplied by, bf16."""
    scale = (x.abs().amax(-1, keepdim=True) / 127).to(torch.bfloat16)
    return (x / scale.to(x.dtype).clamp_min(1e-30)).round().clamp(-127, 127), scale


class PagedCache:
    """The caches of a rank's layers, in `blocks` blocks, as a model takes them; `begin` says what batch comes.

    `written(layer, batch)`, if set, is called as soon as a layer has the keys and values of a batch, before it attends
    to them. `layer` is the model's own number of it.
    """

    def __init__(self, layout: KVLayout, blocks: int, device: torch.device | None = None):
        self.layout, self.blocks, self.device = layout, whole("blocks", blocks), device
        self.layers = [PagedLayer(self, layer) for layer in layout.layers]
        self.written: Callable[[int, Batch], None] | None = None

    def begin(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Expect these items' tokens: (1, tokens), in order, and their positions (1, tokens)."""
        self.batch, self.plan = batch, Plan(batch, self.layout.block_size, self.device)
        tokens = [token for item in batch.items for token in item.tokens]
        return torch.tensor([tokens], dtype=torch.long, device=self.device), self.plan.positions

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, used or not."""
        stores = (store for layer in self.layers for store in (layer.keys, layer.values))
        return sum(x.nbytes for store in stores for x in (store.data, store.scale) if x is not None)


class Plan:
    """Where the tokens of a batch go, and what each request then attends to."""

    def __init__(self, batch: Batch, size: int, device: torch.device | None):
        def whole_numbers(numbers: list) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.long, device=device)

        slots = [(item.blocks[at // size], at % size, at) for item in batch.items
                 for at in range(item.start, item.start + len(item.tokens))]
        self.blocks, self.offsets, positions = whole_numbers(slots).view(-1, 3).unbind(1)
        self.positions = positions.unsqueeze(0)
        self.chunks = list[tuple[slice, torch.Tensor, int]]()  # rows, table, tokens attended to
        ones, tables, seen, row = list[int](), list[list[int]](), list[int](), 0
        for item in batch.items:
            new, context = len(item.tokens), item.start + len(item.tokens)
            table = item.blocks[: -(-context // size)]
            if new == 1:
                ones.append(row)
                tables.append(table)
                seen.append(context)
            else:
                self.chunks.append((slice(row, row + new), whole_numbers([table]), context))
            row += new
        # requests with one new token are attended to together, in tables as long as the longest
        longest = max(map(len, tables), default=0)
        self.ones, self.longest = whole_numbers(ones), max(seen, default=0)
        self.tables = whole_numbers([table + [0] * (longest - len(table)) for table in tables])
        mask = torch.arange(self.longest, device=device) < whole_numbers(seen).unsqueeze(1)
        self.mask = None if mask.all() else mask[:, None, None]


class PagedLayer:
    """One layer's keys and values, in the place of a `LayerCache`."""

    def __init__(self, cache: PagedCache, number: int):
        layout = cache.layout
        self.cache, self.number = cache, number
        self.keys, self.values = (Store(layout, width, cache.blocks, cache.device)
                                  for width in (layout.key, layout.value))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attend: Callable[..., torch.Tensor]
               ) -> torch.Tensor:
        """Write k and v (1, kv_heads, tokens, head_dim), the tokens of all items, then attend item by item:
        q (1, heads, tokens, head_dim) → (1, heads, tokens, value's head_dim)."""
        plan = self.cache.plan
        self.keys.put(plan.blocks, plan.offsets, k[0])
        self.values.put(plan.blocks, plan.offsets, v[0])
        if self.cache.written is not None:
            self.cache.written(self.number, self.cache.batch)
        if not plan.chunks and not len(plan.ones):
            return attend(q, k, v)  # of nothing, in the right shape
        parts = [(rows, attend(q[:, :, rows], *self._read(table, context, q.dtype)))
                 for rows, table, context in plan.chunks]
        if len(plan.ones):
            new = q[0, :, plan.ones].transpose(0, 1).unsqueeze(2)  # (requests, heads, 1, head_dim)
            k, v = self._read(plan.tables, plan.longest, q.dtype)
            ones = attend(new, k, v) if plan.mask is None else attend(new, k, v, mask=plan.mask)
        else:
            ones = None
        some = parts[0][1] if ones is None else ones
        out = some.new_empty(1, q.shape[1], q.shape[2], some.shape[-1])
        for rows, part in parts:
            out[:, :, rows] = part
        if ones is not None:
            out[0, :, plan.ones] = ones.squeeze(2).transpose(0, 1)
        return out

    def _read(self, tables: torch.Tensor, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys.get(tables, dtype)[:, :, :tokens], self.values.get(tables, dtype)[:, :, :tokens]
