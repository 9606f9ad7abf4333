"""Replicas that are to be started: what each is for, how it is cut, and what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..specs import Layout
from .events import Instance, Role, check_role
from .kv_cache import BlockPool
from .request import Limits
from .scheduler import Policy, Scheduler


@dataclass(frozen=True)
class Replica:
    """A replica to be started: what it is for, how its model is cut, and its cache: `blocks` of `block_size` tokens, of
    `dtype` ("fp32", "bf16" or "int8"; the model's own if None). `policy`, `most` and `watermark` are its scheduler's.
    """

    name: str
    blocks: int
    role: Role = "both"
    layout: Layout = field(default_factory=Layout)
    block_size: int = 16
    dtype: str | None = None
    policy: Policy | None = None
    most: int = 256
    watermark: float = 0.0

    def __post_init__(self) -> None:
        check_role(self.name, self.role)

    def instance(self, limits: Limits | None = None) -> Instance:
        """What the control plane knows of it, with an empty pool; `limits` are its model's."""
        scheduler = Scheduler(BlockPool(self.blocks, self.block_size), self.policy, most=self.most,
                              watermark=self.watermark, limits=limits)
        return Instance(self.name, scheduler, self.role, self.layout.world_size)


def pools(prefill: int, decode: int, *, prefill_tp: int = 1, decode_tp: int = 1, **alike: Any) -> list[Replica]:
    """So many replicas for prompts and so many for the rest, "prefill0" and so on, each cut over so many ranks; in all
    else alike: `blocks`, and what else a `Replica` takes."""
    kinds: list[tuple[Role, int, int]] = [("prefill", prefill, prefill_tp), ("decode", decode, decode_tp)]
    return [Replica(f"{role}{i}", role=role, layout=Layout(tp=tp), **alike)
            for role, count, tp in kinds for i in range(count)]
