"""The real engine for `shardlab serve-bench`: a model that is read from a folder, on one process or on tp ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from ..launch import launch
from ..model import Transformer, checkpoint, pretrained
from ..parallel import tensor
from ..serve import Answer, Batch, Engine, Request, WallClock, mixed
from ..specs import ModelSpec
from ..specs.check import whole

DAY = 86400.0  # seconds, for a run


@dataclass(frozen=True)
class Served:
    """A model's name and folder, and how its engine is made."""

    name: str
    folder: Path
    spec: ModelSpec
    tp: int
    budget: int
    blocks: int

    @classmethod
    def of(cls, model: str, tp: int, budget: int, blocks: int) -> Served:
        """small, smollm2 or a Hugging Face folder. Raises ValueError on a folder that is none."""
        named = {"small": pretrained.small, "smollm2": pretrained.smollm2}
        folder = named[model]() if model in named else Path(model)
        if not (folder / "config.json").is_file():
            raise ValueError(f"--real {model} is neither small nor smollm2, nor a folder with a config.json")
        name = model if model in named else folder.resolve().name
        return cls(name, folder, ModelSpec.from_config(folder / "config.json"), whole("tp", tp),
                   whole("budget", budget), whole("blocks", blocks))

    @property
    def vocab(self) -> int:
        return self.spec.vocab

    @property
    def title(self) -> str:
        return f"{self.name}, the real engine on {self.tp} rank{'s' * (self.tp > 1)}"

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """Serve the requests in real time, with a progress bar."""
        if self.tp == 1:
            return serve(None, self, requests)
        return launch(serve, self.tp, self, requests, backend="gloo", timeout=DAY)[0]


class Shown(WallClock):
    """The machine's time, and a bar that counts tokens as they are made."""

    def __init__(self, bar: tqdm):
        super().__init__()
        self.bar = bar

    def spend(self, batch: Batch) -> None:
        self.bar.update(sum(item.samples for item in batch.items))


def serve(group: dist.ProcessGroup | None, served: Served, requests: Sequence[Request]) -> list[Answer]:
    """What each rank does; the answers on the first."""
    with torch.device("meta"):
        model = Transformer(served.spec)
    if group is not None:
        tensor.cut(model, group)
    checkpoint.load(model, served.folder)
    leads = group is None or group.rank() == 0
    with tqdm(total=sum(request.new_tokens for request in requests), unit="token", disable=None if leads else True
              ) as bar:
        return Engine(model, blocks=served.blocks, policy=mixed(served.budget), clock=Shown(bar), group=group
                      ).run(requests)
