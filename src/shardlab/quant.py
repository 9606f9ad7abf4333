"""Weights in fewer bits, to serve a model that does not fit as it is: what to try before cutting.

Round to nearest, symmetric: a block of weights shares one scale, its largest magnitude
over the largest number that the bits can say, and each weight becomes its multiple of
the scale, rounded. int8 has a scale for each output, int4 one for each 128 inputs, fp8
(e4m3) one for each 128 × 128 block, as DeepSeek-V3 publishes its weights.

What it buys is memory, always. A layer unpacks its weight each time it computes, into
the dtype of the rest of the model: on a CPU that costs more time than the fewer bytes
save. A GPU's kernels unpack in registers, and gain what they need not read.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from .model.checkpoint import filling
from .model.parameters import distinct
from .model.transformer import Transformer
from .specs import Format, Packed, dtype_of, format_of

_E4M3 = torch.float8_e4m3fn
_LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": torch.finfo(_E4M3).max}  # of a number, before its scale
_SCALES = {2: torch.bfloat16, 4: torch.float32}


@torch.no_grad()
def quantise(model: Transformer, form: str | Format) -> Transformer:
    """Hold the weights of `model` as `form` says ("int8", "int4", "fp8"), in place, and return it: frozen, to serve.

    Plain or cut: each rank packs its own part, into the bytes that `form.of(group, shape).nbytes(shape)` counts. The
    rest of the model (embedding, head, norms, biases) takes the dtype of `form.rest`, which is bf16, and everything is
    computed in it; `format_of("int8").beside("fp32")` computes in float32. Gradients of inputs are exact. Raises
    ValueError, before anything is changed, on a format not packed here, on a model that is quantised already, on meta
    or in training, and on weights that are not finite.
    """
    form = _packable(model, form)
    for (name, *_), parameter in distinct(model):
        if parameter.is_meta:
            raise ValueError(f"{name} is on meta: quant.load(model, folder, {form.name!r}) reads a checkpoint packed")
        if parameter.grad is not None:
            raise ValueError(f"{name} has a gradient: training needs the whole weights; quantise a copy, to serve")
        if not parameter.isfinite().all():
            raise ValueError(f"{name} holds nan or inf, which no scale can express")
    groups, names = _groups(model), [name for (name, *_), _ in distinct(model)]
    for name in names:
        _hold(model, name, form, groups[name])
    return model


@torch.no_grad()
def load(model: Transformer, folder: str | Path, form: str | Format, device: torch.device | str = "cpu") -> int:
    """Fill `model`, on meta, from a Hugging Face folder, packing each tensor before the next is read; give bytes read.

    It becomes what `quantise(from_folder(folder, dtype), form)` is, `dtype` being the model's, on a card that could
    never hold the plain weights: one tensor at a time is there unpacked. A cut model reads its own slices. Raises
    ValueError as `checkpoint.load` and `quantise` do.
    """
    form, groups, read = _packable(model, form), _groups(model), 0
    for name, nbytes in filling(model, folder, device):
        _hold(model, name, form, groups[name])
        read += nbytes
    return read


class Unpack(nn.Module):
    """A parametrization: what a layer gets when it asks for the weight that it holds packed.

    `right_inverse` packs a weight into what is held, two tensors of bytes (as bytes, so
    that `model.to(dtype)` leaves them alone); `forward` unpacks it again, rounded.
    """

    def __init__(self, packed: Packed, shape: torch.Size, dtype: torch.dtype):
        super().__init__()
        self.packed, self.shape, self.dtype = packed, shape, dtype

    def right_inverse(self, weight: torch.Tensor) -> list[torch.Tensor]:
        numbers, scales = pack(weight, self.packed)
        return [numbers, scales.view(torch.uint8)]

    def forward(self, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        scales = scales.view(_SCALES[self.packed.scale_bytes])
        return unpack(numbers, scales, self.packed, self.shape[1]).to(self.dtype)


def pack(weight: torch.Tensor, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight (out, in) → its numbers, as bytes (out, bytes of a row), and its scales.

    The scales are (blocks down, blocks across).
    """
    rows, columns = weight.shape
    largest, blocks = _LARGEST[packed.name], _blocks(weight.float(), packed)
    top = blocks.abs().amax((1, 3))
    scales = (top / largest).to(_SCALES[packed.scale_bytes])
    scales = scales.where(scales > 0, 1)  # where all is zero, as padding is
    x = (blocks / scales.float()[:, None, :, None]).clamp(-largest, largest)
    x = x.flatten(2).flatten(0, 1)[:rows, :columns]
    if packed.name == "fp8":
        return x.to(_E4M3).view(torch.uint8), scales
    numbers = x.round().to(torch.int8)
    if packed.name == "int8":
        return numbers.view(torch.uint8), scales
    pairs = F.pad(numbers + 8, (0, columns % 2)).to(torch.uint8)  # 1 to 15, in 4 bits
    return pairs[:, 0::2] | pairs[:, 1::2] << 4, scales


def unpack(numbers: torch.Tensor, scales: torch.Tensor, packed: Packed,
           columns: int) -> torch.Tensor:
    """What `pack` gave → the weight (out, `columns`) in float32, rounded."""
    if packed.name == "fp8":
        x = numbers.view(_E4M3)
    elif packed.name == "int8":
        x = numbers.view(torch.int8)
    else:
        pairs = torch.stack((numbers & 15, numbers >> 4), -1)
        x = pairs.flatten(1)[:, :columns].to(torch.int8) - 8
    scaled = _blocks(x.float(), packed) * scales.float()[:, None, :, None]
    return scaled.flatten(2).flatten(0, 1)[: x.shape[0], :columns]


class LayerError(NamedTuple):
    """What quantising did to one matrix: ‖W − Ŵ‖ ÷ ‖W‖, and the same of its outputs for the inputs it really gets."""

    name: str
    weight: float
    output: float


class Errors(NamedTuple):
    """What quantising did to a model: each matrix alone, and all together in the logits.

    `logits` is ‖z − ẑ‖ ÷ ‖z‖ of the logits less their mean (what softmax sees), `kl` the mean of KL(p‖p̂) over
    positions in nats, `same` the part of positions whose likeliest next token stays the same.
    """

    layers: list[LayerError]
    logits: float
    kl: float
    same: float


@torch.no_grad()
def errors(plain: Transformer, quantised: Transformer, tokens: torch.Tensor) -> Errors:
    """Compare `quantised` with the `plain` model that it was, on tokens (batch, seq); both whole, not cut.

    Raises ValueError on two different models, and on a cut one, whose layers give parts of sums.
    """
    if list(plain.spec.tensors()) != list(quantised.spec.tensors()):
        raise ValueError(f"{plain.spec.name} and {quantised.spec.name} differ in shape: compare a model with itself, "
                         "quantised")
    if any(hasattr(parameter, "window") for _, parameter in distinct(plain)):
        raise ValueError("the model is cut, and each rank has parts of its outputs: compare whole models")
    layers: list[LayerError] = []

    def compare(other: nn.Linear, name: str, layer: nn.Linear, args: tuple[torch.Tensor], out: torch.Tensor) -> None:
        weight = other.weight.to(layer.weight.dtype)
        output = F.linear(args[0], weight, layer.bias)
        layers.append(LayerError(name, _relative(layer.weight, weight), _relative(out, output)))

    packed = {name: module for name, module in quantised.named_modules() if parametrize.is_parametrized(module)}
    hooks = [module.register_forward_hook(partial(compare, packed[name], name))
             for name, module in plain.named_modules() if name in packed]
    try:
        z = plain(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    few = zip(*(y.flatten(0, 1).split(16) for y in (z, quantised(tokens))), strict=True)
    off, size, kl, same = torch.stack([_differ(*pair) for pair in few]).sum(0).tolist()
    n = tokens.numel()
    return Errors(layers, (off / size) ** 0.5, kl / n, same / n)


def _differ(z: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Of a few positions' logits (positions, vocab), less their means: ‖z − ẑ‖², ‖z‖², the sum of KL(p‖p̂), and how many
    have the same likeliest token. A few at a time: in float64 those of all would outweigh the model."""
    z, other = (y.double() - y.double().mean(-1, keepdim=True) for y in (z, other))
    kl = F.kl_div(other.log_softmax(-1), z.log_softmax(-1), log_target=True, reduction="sum")
    same = (z.argmax(-1) == other.argmax(-1)).sum()
    return torch.stack((((z - other) ** 2).sum(), (z**2).sum(), kl, same.double()))


def _packable(model: Transformer, form: str | Format) -> Format:
    """`form`, if it can be computed from here and `model` is not packed yet; ValueError if not."""
    form = format_of(form)
    if any(isinstance(module, Unpack) for module in model.modules()):
        raise ValueError("this model is quantised already, and what was rounded off is gone: quantise the plain one")
    for packed in (form.matrix, form.expert):
        if packed != form.rest and packed.name not in _LARGEST:
            raise ValueError(f"{packed.name} matrices beside {form.rest.name} are not computed here: use one of "
                             f"{', '.join(_LARGEST)}, or one plain dtype for all")
    return form


def _groups(model: Transformer) -> dict[str, str]:
    return {tensor.name: tensor.group for tensor in model.spec.tensors()}


def _hold(model: Transformer, name: str, form: Format, group: str) -> None:
    """Turn one parameter into what `form` makes of it, under its own name."""
    parameter, dtype = model.get_parameter(name), getattr(torch, dtype_of(form.rest.name).torch)
    parameter.requires_grad_(False)
    packed = form.of(group, parameter.shape)
    if packed.name in _LARGEST:
        layer, _, attribute = name.rpartition(".")
        unpack = Unpack(packed, parameter.shape, dtype)
        parametrize.register_parametrization(model.get_submodule(layer), attribute, unpack, unsafe=True)
    else:
        parameter.data = parameter.to(dtype)  # the same parameter, so that a tied head stays tied


def _blocks(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """(out, in) → (blocks down, rows of one, blocks across, columns of one), filled up with zeros at the edges."""
    rows, columns = x.shape
    down, across = packed.block or (0, 0)
    down, across = down or rows, across or columns
    x = F.pad(x, (0, -columns % across, 0, -rows % down))
    return x.view(-1, down, x.shape[1] // across, across)


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / a.norm()).item()
