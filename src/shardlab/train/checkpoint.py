"""Checkpoints: the whole model and its optimizer's states, from which a run goes on under any layout.

    found = checkpoint.latest(folder)
    done = checkpoint.load(found, model, optimizer) if found else 0
    for first in range(done, 1000, 100):
        train(model, optimizer, batches, range(first, first + 100), …, seed=seed)
        checkpoint.save(folder, model, optimizer, first + 100, keep=2, seed=seed)

A checkpoint is a folder, `step-00000100` after 100 steps:

| file                            | holds                                                                             |
|---------------------------------|-----------------------------------------------------------------------------------|
| model.safetensors, config.json  | the weights, as a Hugging Face folder: `transformers` and `weights.load` read it  |
| optimizer.safetensors           | a state of each weight: exp_avg.NAME, momentum_buffer.NAME, and in master.NAME    |
|                                 | the float32 copy of one of 16 bits                                                |
| manifest.json                   | the step, every tensor's shape and dtype, counters, the optimizer's kind and      |
|                                 | options, the layout it was written from, and what `save` was given besides        |

Names and shapes are the plain model's, whatever it is cut into: a rank reads the part of each that it holds. (Large
ones are in several files, beside an index.) There is no random state in it, of no rank: batches, dropout and the
learning rate are functions of the seed, the step and a rank's place alone, so that the step and the seed are all that a
run needs to draw what it would have drawn. `extra` is the place for the seed.

Nothing is ever half there. The first rank writes into a hidden folder, has it on the disk, and renames it; a process
that is killed before that leaves the last checkpoint as it was, and its hidden folder to the next `save`, which removes
it. So a folder is one run's, and has to be the same on all ranks.
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import optim

from ..model.folders import is_full, leftovers, written_whole
from ..model.hf_config import config, stored_name
from ..model.stored import write_tensors
from ..model.transformer import Transformer
from ..parallel import weights
from ..parallel.agreement import together, told, travels_on
from ..parallel.stepped import sharded
from ..parallel.whole import Entry, listed, tensors
from ..specs.check import whole
from . import manifest

__all__ = ["latest", "load", "save"]


def save(folder: str | Path, model: Transformer, optimizer: optim.Optimizer, step: int, *, keep: int | None = None,
         **extra: Any) -> Path:
    """Write the checkpoint of `model` and `optimizer` after `step` steps into `folder`; returns its own folder.

    Every rank calls it, between two steps, on a model under any layout. The first rank writes: it holds a file's
    tensors at a time, 2 GiB, the others one tensor. `extra` is what JSON can say, for `manifest.read(…)["extra"]`. With
    `keep` the last so many stay, of those up to this step, and older ones are removed.

    Raises, on all ranks, ValueError on a `step` below 0 and a `keep` below 1, TypeError on an `extra` that JSON can't
    say, FileExistsError where that step's checkpoint is there, and OSError where it can't be written (a full disk,
    say); what was there before is as it was.
    """
    whole("step", step, 0)
    if keep is not None:
        whole("keep", keep)
    json.dumps(extra)
    target = Path(folder) / f"step-{step:08}"
    entries = listed(model, optimizer)
    writes = not dist.is_initialized() or dist.get_rank() == 0
    failure: Exception | None = None
    if writes and is_full(target):
        failure = FileExistsError(f"{target} exists already: a run that goes on from an earlier step needs a folder of "
                                  "its own, or the later checkpoints removed")
    together(failure, f"write {target}")
    streams = [tensors(model, some, optimizer) for some in _parts(entries)]
    if writes:
        try:
            for each in leftovers(Path(folder), "step-*"):
                shutil.rmtree(each)
            with written_whole(target) as unfinished:
                with suppress(ValueError):  # no Hugging Face type has these layers: then it is no such folder
                    text = json.dumps(config(model.spec, entries[0].dtype), indent=2) + "\n"
                    (unfinished / "config.json").write_text(text, encoding="utf-8")
                for stem, stream in zip(("model", weights.OPTIMIZER), streams, strict=True):
                    write_tensors(((_name(model, entry), value) for entry, value in stream), unfinished, stem)
                text = manifest.written(model, optimizer, entries, step, extra)
                (unfinished / manifest.NAME).write_text(text, encoding="utf-8")
            if keep is not None:
                _remove([each for each in _complete(Path(folder)) if _step(each) <= step][:-keep])
        except Exception as error:  # the others wait for this rank's part in what follows
            failure = error
    for stream in streams:
        for _ in stream:
            pass
    together(failure, f"write {target}")
    return target


def load(folder: str | Path, model: Transformer, optimizer: optim.Optimizer) -> int:
    """Take over the checkpoint in `folder`, which `save` or `latest` gave; returns its step, the next one to run.

    Every rank calls it, each reads what it holds of `model`, which is plain or cut under any layout, and of
    `optimizer`. Its options, the learning rate among them, become those of the checkpoint. Raises ValueError, on all
    ranks and before anything is changed, where the folder is no checkpoint or damaged; where the model has other
    tensors (the first that differs is named), dtypes or sizes; where the optimizer is of another kind, has other
    groups, or keeps float32 copies of 16-bit weights where the checkpoint has none, or the reverse; and on a model on
    the meta device, other than under ZeRO.
    """
    folder = Path(folder)
    entries = listed(model, optimizer)
    failure: Exception | None = None
    found: dict[str, Any] = {}
    try:
        if sharded(model) is None and any(each.is_meta for each in model.parameters()):
            raise ValueError("this model is on the meta device, and its optimizer too: give it memory "
                             "(model.materialise), then make the optimizer, then load")
        found = manifest.read(folder)
        manifest.check(found, folder, model, optimizer, entries)
    except (ValueError, OSError) as error:
        failure = error
    together(failure, f"load {folder}")
    weights.load(model, folder)
    weights.load_states(model, optimizer, folder, {name: each["states"] for name, each in found["tensors"].items()})
    # a rank without layers may have no group, or an empty one
    for group, options in zip(optimizer.param_groups, found["optimizer"]["groups"], strict=False):
        for name, value in options.items():
            if torch.is_tensor(group.get(name)):
                group[name].fill_(value)
            else:
                group[name] = tuple(value) if isinstance(value, list) else value
    return found["step"]


def latest(folder: str | Path) -> Path | None:
    """The checkpoint of the most steps in `folder`, or None: no folder, or none in it. Every rank calls it, and gets
    what the first one sees."""
    found = next((str(each) for each in reversed(_complete(Path(folder)))), None)
    if dist.is_initialized():
        world: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
        found = told(found, world, travels_on(world))[0]
    return None if found is None else Path(found)


def _parts(entries: list[Entry]) -> tuple[list[Entry], list[Entry]]:
    """The weights, and the states that are tensors."""
    return ([each for each in entries if not each.state],
            [each for each in entries if each.state and each.number is None])


def _name(model: Transformer, entry: Entry) -> str:
    """What a tensor is called in its file."""
    name = stored_name(model.spec, entry.name)
    return f"{entry.state}.{name}" if entry.state else name


def _complete(folder: Path) -> list[Path]:
    """The checkpoints in a folder, by step."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((each for each in found if re.fullmatch(r"step-\d{8,}", each.name)
                   and (each / manifest.NAME).is_file()), key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _remove(old: list[Path]) -> None:
    """Remove checkpoints, each hidden first: half of one is never seen."""
    for each in old:
        hidden = each.with_name(f".{each.name}.{uuid.uuid4().hex}")
        each.rename(hidden)
        shutil.rmtree(hidden)
