"""How tensors are stored: plain numbers of one width, or few bits a number with a scale for each block of them.

All quantised formats here are symmetric: a number is its few bits times the scale of its block. Bytes are exact, scales
and ragged last blocks included.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .dtype import Dtype, dtype_of


class Packed(NamedTuple):
    """How one tensor is stored: `bits` a number, and one scale of `scale_bytes` for each `block` of (rows, columns).

    A 0 in the block stands for the whole dim; None means no scales. Rows are outputs, columns inputs, as in nn.Linear.
    """

    name: str
    bits: int
    block: tuple[int, int] | None = None
    scale_bytes: int = 0

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of `shape`, scales included. Each row fills whole bytes: 5
        numbers of 4 bits take 3."""
        packed = math.prod(shape[:-1]) * -(-shape[-1] * self.bits // 8)
        return packed + self.scales(shape) * self.scale_bytes if self.block else packed

    def scales(self, shape: tuple[int, ...]) -> int:
        """How many scales a tensor of `shape` has: a block cut short by the edge has one too."""
        if self.block is None:
            return 0
        *stacked, rows, columns = (1, *shape)
        down, across = self.block
        return math.prod(stacked) * -(-rows // (down or rows)) * -(-columns // (across or columns))


class Format(NamedTuple):
    """How a whole model is stored.

    `matrix` is for the 2-D weights of attention and feed-forward blocks, `expert` for those of routed experts, `rest`
    for everything else: embedding, head, norms, router, biases.
    """

    name: str
    matrix: Packed
    expert: Packed
    rest: Packed

    def of(self, group: str, shape: tuple[int, ...]) -> Packed:
        """How a tensor of `shape` in `group` (`TensorSpec.group`) is stored."""
        if len(shape) != 2:
            return self.rest
        if group == "experts":
            return self.expert
        return self.matrix if group in _MATRICES else self.rest

    def beside(self, dtype: object) -> Format:
        """The same matrices, with the rest in another plain `dtype`: `format_of("int8").beside("fp32")`."""
        plain = dtype_of(dtype)
        return self._replace(name=f"{self.name} beside {plain.name}", rest=_plain(plain).rest)


_MATRICES = frozenset(("attention", "mlp", "shared"))
_BF16 = Packed("bf16", 16)
# int8: fp32 scales cost 4 bytes a row, 0.1% of 4096 inputs. int4: a scale every 64 bytes is worth halving, to 4.125
# bits a number. fp8 e4m3: as DeepSeek-V3 publishes its weights (README_WEIGHTS.md, weight_block_size). MXFP4: OCP
# Microscaling Formats v1.0, blocks of 32 under a power of two in one byte: 4.25 bits.
_INT8, _INT4 = Packed("int8", 8, (1, 0), 4), Packed("int4", 4, (1, 128), 2)
_FP8, _MXFP4 = Packed("fp8", 8, (128, 128), 4), Packed("mxfp4", 4, (1, 32), 1)
_QUANTISED = {
    "int8": Format("int8", _INT8, _INT8, _BF16),
    "int4": Format("int4", _INT4, _INT4, _BF16),
    "fp8": Format("fp8", _FP8, _FP8, _BF16),
    "mxfp4": Format("mxfp4", _BF16, _MXFP4, _BF16),  # gpt-oss: experts alone
    "fp4-fp8": Format("fp4-fp8", _FP8, _MXFP4, _BF16),  # DeepSeek-V4: experts in four bits, other matrices in eight
}


def format_of(name: object) -> Format:
    """The format called `name`: a plain number format, as `dtype_of` knows them, or a quantised one.

    Quantised are "int8" (a scale for each output), "int4" (a scale for each 128 inputs), "fp8" (e4m3, a scale for each
    128 × 128 block), "mxfp4" (gpt-oss) and "fp4-fp8" (DeepSeek-V4). Raises ValueError on another name, with those there
    are.
    """
    if isinstance(name, Format):
        return name
    if known := _QUANTISED.get(str(name)):
        return known
    try:
        plain = dtype_of(name)
    except ValueError as error:
        raise ValueError(f"{error}, or quantised: {', '.join(_QUANTISED)}") from None
    return _plain(plain)


def _plain(dtype: Dtype) -> Format:
    stored = Packed(dtype.name, 8 * dtype.bytes)
    return Format(dtype.name, stored, stored, stored)
