"""What a checkpoint says of itself, in JSON: the step, every tensor, the optimizer. And whether a run fits it.

Numbers that an optimizer has one of for a parameter, its counter of steps say, stand here too; Python writes floats so
that they are read back to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim

from ..model.hf_config import stored_name
from ..model.stored import Stored
from ..model.transformer import Transformer
from ..parallel import grads
from ..parallel.stepped import MASTER
from ..parallel.weights import OPTIMIZER
from ..parallel.whole import Entry
from ..specs import ModelSpec

NAME, FORMAT = "manifest.json", 1
BESIDE = ("name", "torch_dtype", "stored", "mtp", "max_positions")  # of a spec: what computes nothing


def written(model: Transformer, optimizer: optim.Optimizer, entries: Sequence[Entry], step: int,
            extra: Mapping[str, Any]) -> str:
    """The manifest of a checkpoint after `step` steps, as text. Raises TypeError on what JSON can't say."""
    tensors: dict[str, dict[str, Any]] = {}
    for each in entries:
        name = stored_name(model.spec, each.name)
        if each.state:
            tensors[name]["states"][each.state] = [each.dtype, each.number]
        else:
            tensors[name] = {"shape": each.shape, "dtype": each.dtype, "group": each.group, "states": {}}
    return json.dumps({
        "format": FORMAT, "step": step, "model": _computed(model.spec), "layout": _layout(model),
        "optimizer": {"kind": type(optimizer).__name__, "groups": [_options(each) for each in optimizer.param_groups]},
        "tensors": tensors, "extra": dict(extra)}, indent=1) + "\n"


def read(folder: str | Path) -> dict[str, Any]:
    """The manifest of the checkpoint in `folder`: "step", "extra" and what else `written` puts there. Raises ValueError
    where there is none, or one that can't be read."""
    path = Path(folder) / NAME
    if not path.is_file():
        raise ValueError(f"{folder} is no checkpoint: it has no {NAME}; of a folder with several, latest(folder) is "
                         "the last, and weights alone are read by parallel.weights.load")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        known = found["format"] == FORMAT and all(
            isinstance(found[key], kind) for key, kind in
            (("step", int), ("model", dict), ("optimizer", dict), ("tensors", dict), ("extra", dict)))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} can't be read ({error!r}): it is damaged; go on from another checkpoint") from None
    if not known:
        raise ValueError(f"{path} is of format {found['format']!r}, and this version reads {FORMAT}")
    return found


def check(found: Mapping[str, Any], folder: Path, model: Transformer, optimizer: optim.Optimizer,
          entries: Sequence[Entry]) -> None:
    """Raise ValueError where the checkpoint is of another model, or another optimizer, than this run's, or where its
    files have not what the manifest says. `entries` are the run's, all it has of the whole model."""
    here = {stored_name(model.spec, each.name): each for each in entries if not each.state}
    there = found["tensors"]
    for name in dict.fromkeys((*here, *there)):
        shapes = [f"is {tuple(shape)}" if shape is not None else "is missing" for shape in (
            there[name]["shape"] if name in there else None, here[name].shape if name in here else None)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"{folder} is of another model: {name} {shapes[0]} there and {shapes[1]} here")
        if there[name]["dtype"] != here[name].dtype:
            raise ValueError(f"{name} is {there[name]['dtype']} in {folder} and {here[name].dtype} here: build the "
                             "model in that dtype, or read the weights alone, which parallel.weights.load converts")
    ours = json.loads(json.dumps(_computed(model.spec)))
    for key, value in found["model"].items():
        if value != ours.get(key):
            raise ValueError(f"{folder} is of another model, with tensors of the same shapes: its {key} is {value!r}, "
                             f"here it is {ours.get(key)!r}")
    _check_optimizer(found, folder, optimizer, here, {each.name for each in entries if each.state == MASTER})
    for stem, wanted in (("model", {name: each.shape for name, each in here.items()}),
                         (OPTIMIZER, _states(there))):
        if wanted:
            with Stored(folder, stem) as stored:
                for name, shape in wanted.items():
                    if name not in stored.names or list(stored.tensor(name).shape) != shape:
                        raise ValueError(f"{folder} lacks {name} of shape {tuple(shape)}, which its {NAME} says is "
                                         "there: it is damaged; go on from another checkpoint")


def _check_optimizer(found: Mapping[str, Any], folder: Path, optimizer: optim.Optimizer, here: Mapping[str, Entry],
                     masters: set[str]) -> None:
    kind = type(optimizer).__name__
    if found["optimizer"]["kind"] != kind:
        raise ValueError(f"{folder} has the states of {found['optimizer']['kind']}, and this run's optimizer is "
                         f"{kind}: take the other, or read the weights alone with parallel.weights.load")
    for name, each in here.items():
        saved = found["tensors"][name]
        if saved["group"] != each.group:
            groups = ["none" if group is None else f"number {group}" for group in (saved["group"], each.group)]
            raise ValueError(f"of the optimizer's groups {name} is in {groups[0]} in {folder}, and in {groups[1]} "
                             "here: make the same groups")
        kept = [MASTER in saved["states"], each.name in masters]
        if kept[0] != kept[1]:
            raise ValueError(f"{folder} has {'a' if kept[0] else 'no'} float32 copy of {name}, which is {each.dtype}, "
                             f"and this run keeps {'one' if kept[1] else 'none'}: keep such copies in both or in none "
                             "(ZeRO always does)")


def _states(tensors: Mapping[str, Any]) -> dict[str, list[int]]:
    """The shape of every state that is a tensor, by its name in the folder."""
    return {f"{state}.{name}": each["shape"] for name, each in tensors.items()
            for state, (_, number) in each["states"].items() if number is None}


def _computed(spec: ModelSpec) -> dict[str, Any]:
    return {key: value for key, value in asdict(spec).items() if key not in BESIDE}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's group without its parameters."""
    return {key: value.item() if torch.is_tensor(value) else value for key, value in group.items() if key != "params"}


def _layout(model: nn.Module) -> dict[str, int]:
    """The degrees of the layout that the model has here: for the reader, since any other will do."""
    reducer = getattr(model, "reducer", None)
    groups = {"pp": getattr(model, "pipeline", None), "data": reducer, "cp": getattr(model, "context", None),
              "tp": getattr(model, "embed_tokens", None)}
    sizes = {axis: getattr(each, "group", None) for axis, each in groups.items()}
    sizes["ep"] = next((each.cut[-1] for each in grads.marks(model).values() if each.spread), None)
    zero = 0 if reducer is None or not reducer.shards else 1 + reducer.repeats + reducer.partial
    return {"ranks": dist.get_world_size() if dist.is_initialized() else 1,
            **{axis: 1 if group is None else group.size() for axis, group in sizes.items()}, "zero": zero}
