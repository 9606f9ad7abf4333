"""Loading and saving Hugging Face folders: config.json beside safetensors files, under the model's own names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from ..specs import ModelSpec
from .folders import written_whole
from .hf_config import config, stored_name
from .parameters import Window, distinct, materialised
from .stored import Stored, some, write_tensors
from .transformer import Transformer

__all__ = ["Window", "from_folder", "load", "save"]


def from_folder(
    folder: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Transformer:
    """The plain model in a Hugging Face folder, its weights read as `dtype`. Raises ValueError as `load` does."""
    with torch.device("meta"):
        model = Transformer(ModelSpec.from_config(folder)).to(dtype)
    load(model, folder, device)
    return model


def load(model: Transformer, folder: str | Path, device: torch.device | str = "cpu") -> int:
    """Fill `model` from a Hugging Face folder and return the bytes read: those of its own slices, no others.

    A parameter with a `window` takes that part of the stored tensor and zeros beyond it. Parameters on meta get memory
    on `device` first. Stored numbers are converted to the parameter's dtype. Raises ValueError, before anything is
    changed, on missing, unexpected or mis-shaped tensors and damaged files; afterwards where tied tensors are stored
    twice and differ.
    """
    return sum(read for _, read in filling(model, folder, device))


@torch.no_grad()
def filling(
    model: Transformer, folder: str | Path, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, int]]:
    """`load` step by step: (name, bytes read) of one parameter of `model` after another, each as it is filled.

    The next one takes no memory before it is asked for, so that the caller can make the last one smaller first.
    """
    with Stored(folder) as stored:
        sources = _match(model, stored)
        for (names, unfilled), (first, *copies) in zip(distinct(model), sources, strict=True):
            parameter = materialised(model, names, unfilled, device)
            read = _fill(parameter, stored.tensor(first))
            for copy in copies:
                other = part(parameter, stored.tensor(copy))
                read += other.nbytes
                if not torch.equal(_held(parameter), other.to(parameter)):
                    raise ValueError(_untied(folder, first, copy))
            del parameter  # the caller's to drop
            yield names[0], read


@contextmanager
def matched(model: Transformer, folder: str | Path) -> Iterator[dict[nn.Parameter, torch.Tensor]]:
    """For each parameter of `model` the part of the stored tensor in its window, to be read in the block.

    A view of the file: read as it is touched, to be copied, never written to. Raises ValueError as `load` does; where
    tied tensors are stored twice, both are read to see that they are equal.
    """
    with Stored(folder) as stored:
        sources = {}
        for (_, parameter), (first, *copies) in zip(distinct(model), _match(model, stored), strict=True):
            sources[parameter] = part(parameter, stored.tensor(first))
            for copy in copies:
                if not torch.equal(sources[parameter], part(parameter, stored.tensor(copy))):
                    raise ValueError(_untied(folder, first, copy))
        yield sources


def save(model: Transformer, folder: str | Path) -> None:
    """Write the plain model as a Hugging Face folder that `transformers` loads, in the dtype of its parameters.

    The folder appears whole or not at all. Raises FileExistsError where it is there and not empty, ValueError on a cut
    model.
    """
    parameters = {stored_name(model.spec, names[0]): parameter for names, parameter in distinct(model)}
    whole = {stored_name(model.spec, tensor.name): tensor.shape for tensor in model.spec.tensors()}
    for name, parameter in parameters.items():
        if name not in whole:
            raise ValueError(f"{name} is no weight of the plain model: if it was quantised, save it before that")
        # by its shape too: `load_state_dict(assign=True)` replaces parameters, and the window is lost
        cut = hasattr(parameter, "window") or tuple(parameter.shape) != whole[name]
        cut = cut or parameter.untyped_storage().nbytes() < parameter.nbytes  # by ZeRO-3, and not gathered
        if cut or parameter.is_meta:
            raise ValueError(f"{name} is {'cut' if cut else 'on meta'}: save the whole model")
    if missing := whole.keys() - parameters.keys():
        raise ValueError(f"{min(missing)} is on another rank: save the whole model")
    dtype = next(model.parameters()).dtype
    with written_whole(Path(folder)) as unfinished:
        write(model.spec, dtype, ((names[0], parameter) for names, parameter in distinct(model)), unfinished)


def write(spec: ModelSpec, dtype: torch.dtype, values: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Write into `folder` whole `values`, by the plain model's names, each of two tied ones once, and a config.json
    that says `dtype`. Raises ValueError where no model type has the spec's layers."""
    text = json.dumps(config(spec, str(dtype).removeprefix("torch.")), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    write_tensors(((stored_name(spec, name), value) for name, value in values), folder)


def _untied(folder: str | Path, first: str, copy: str) -> str:
    return (f"{folder} ties {first} and {copy}, yet stores two different tensors: "
            'set "tie_word_embeddings": false in its config.json to keep both')


def _match(model: Transformer, stored: Stored) -> list[list[str]]:
    """The stored tensors that each distinct parameter is: one, or several that are tied. ValueError on a mismatch."""
    spec = model.spec
    wanted = [([stored_name(spec, name) for name in names], whole_shape(held)) for names, held in distinct(model)]
    sources = [[name for name in names if name in stored.names] for names, _ in wanted]
    known = {stored_name(spec, tensor.name) for tensor in spec.tensors()}.union(*(names for names, _ in wanted))
    missing = [names[0] for (names, _), found in zip(wanted, sources, strict=True) if not found]
    beside = tuple(f"model.layers.{layer}." for layer in range(spec.layers, spec.layers + spec.mtp))  # MTP modules
    unexpected = sorted(name for name in stored.names - known
                        if not name.endswith(".rotary_emb.inv_freq") and not name.startswith(beside))
    shapes = []
    for (_, shape), found in zip(wanted, sources, strict=True):
        actual = {name: tuple(stored.tensor(name).shape) for name in found}
        shapes += [f"{name} is {actual[name]}, not {shape}" for name in found if actual[name] != shape]
    problems = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
    if listed := "; ".join(f"{what}: {some(names)}" for what, names in problems.items() if names):
        raise ValueError(f"{stored.folder} does not fit {model.spec.name}: {listed}. Is its config.json the model's?")
    return sources


def whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of the whole tensor that a parameter is, or is a window of."""
    shape, window = list(parameter.shape), getattr(parameter, "window", None)
    if window is not None:
        shape[window.dim] = window.full
    return tuple(shape)


def part(parameter: nn.Parameter, stored: torch.Tensor) -> torch.Tensor:
    """The part of the stored tensor that the parameter holds."""
    window: Window | None = getattr(parameter, "window", None)
    return stored if window is None else stored.narrow(window.dim, window.start, window.stop - window.start)


def _held(parameter: nn.Parameter) -> torch.Tensor:
    """The parameter without its padding."""
    window: Window | None = getattr(parameter, "window", None)
    return parameter if window is None else parameter.narrow(window.dim, 0, window.stop - window.start)


def _fill(parameter: nn.Parameter, stored: torch.Tensor) -> int:
    """Copy the stored part into the parameter, zeros into its padding; return the bytes read.

    Copied, though the file is mapped: a parameter that is a view of the file would keep all of it, and change with it.
    """
    source, held = part(parameter, stored), _held(parameter)
    if held.numel() < parameter.numel():
        parameter.zero_()
    held.copy_(source)
    return source.nbytes
