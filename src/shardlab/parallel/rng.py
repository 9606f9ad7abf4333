"""What is random on several ranks: a stream of numbers for each dropout layer, named after it.

Where all ranks hold the same numbers they must drop the same, or what was whole is whole no more; where each holds its
own they should drop independently of each other. So the streams of a cut model are of two kinds:

| what is dropped                               | ranks hold       | streams on the ranks                |
|-----------------------------------------------|------------------|-------------------------------------|
| the stream between cut layers                 | the same         | the same                            |
| the same, with sequence parallelism           | their own tokens | different                           |
| what attention puts out, before it is summed  | their own heads  | different                           |
| any of it, with the sequence cut              | their own tokens | different                           |
| any of it, on another replica of the model    | other data       | different                           |

A stream depends on the seed, the layer's name, these coordinates and the step alone: on nothing that ran before, and
not on which layers are held besides. So training that is taken up again at a step has no random state to read.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import nn

from ..model.dropout import Dropout


class ParallelDropout(Dropout):
    """Dropout in a model cut over `group`: each rank has numbers of its own to drop if `sharded`, else the same.

    The model may be cut over other groups before."""

    def __init__(self, plain: Dropout, group: dist.ProcessGroup, sharded: bool):
        super().__init__(plain.p)
        known: tuple[int, ...] = getattr(plain, "coordinates", ())
        self.coordinates = (*known, group.rank()) if sharded else known
        self.train(plain.training)

    def draw(self) -> int | None:
        """As `Dropout.draw`. Raises RuntimeError before `seed` was called: ranks may be seeded differently."""
        if self.training and self.p and self.generator is None:
            raise RuntimeError("the ranks of a cut model have to agree on what they drop: call rng.seed(model, seed, "
                               "replica), with one seed on all ranks, before training, or model.eval()")
        return super().draw()


def seed(model: nn.Module, seed: int, replica: int = 0, step: int = 0) -> None:
    """Begin the stream of every dropout layer of `model`, plain or cut.

    `seed` is the same on all ranks, `replica` is this rank's place on the data axis. Called before each step with its
    number, a step drops the same numbers whatever has run before it.
    """
    for name, module in model.named_modules():
        if isinstance(module, Dropout):
            module.generator = stream(seed, name, replica, getattr(module, "coordinates", ()), step)


def stream(*key: object) -> torch.Generator:
    """A generator that begins at a place of its own for each `key`, of numbers, strings and None."""
    digest = blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
