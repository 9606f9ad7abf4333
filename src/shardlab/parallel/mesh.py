"""Process groups along named axes: which ranks stand together for which cut."""

from __future__ import annotations

import math
from functools import cache

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..comm.groups import level


def build(**axes: int) -> DeviceMesh:
    """A mesh over all ranks with the named axes and their sizes, the last axis over neighbouring ranks.

    `build(dp=2, tp=2).get_group("tp")` is this rank's group for tensor parallelism: ranks (0, 1) or (2, 3).
    Every rank must call it, at the same point of its program; called again with the same axes, it gives the same mesh.
    Raises ValueError where the product of the sizes is not the world size.
    """
    world = dist.get_world_size()
    if math.prod(axes.values()) != world:
        product = " × ".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(f"{product} makes {math.prod(axes.values())} ranks, and there are {world}")
    return _mesh(dist.group.WORLD, tuple(axes.items()))


def blocks(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """This rank's block of `size` neighbouring ranks of `group`, as a group of its own; all its ranks must call it.

    Called again, it gives the same group. Raises ValueError where `size` does not divide the group.
    """
    p = group.size()
    if p % size:
        raise ValueError(f"a group of {p} ranks has no blocks of {size}")
    return group if size == p else _block(group, size)


def some(group: dist.ProcessGroup, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The group of these global ranks, some of `group`'s, or None where this rank is not one of them; all of `group`'s
    ranks must call it. Called again, it gives the same group."""
    return _some(group, tuple(sorted(ranks)))


# Groups last as long as the ranks, and each of gloo's has a thread that wakes a hundred times a second: ranks that stay
# for many runs would slow down with every mesh that they don't use again.


@cache
def _mesh(world: dist.ProcessGroup, axes: tuple[tuple[str, int], ...]) -> DeviceMesh:
    names, sizes = zip(*axes, strict=True)
    backend = dist.get_backend(world)
    device = "cuda" if "nccl" in backend else "cpu"
    # naming the backend keeps torch from lending the world's own group to an axis that spans it: each axis has its name
    return init_device_mesh(device, sizes, mesh_dim_names=names, backend_override=dict.fromkeys(names, backend))


@cache
def _block(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    level(group)
    ranks = dist.get_process_group_ranks(group)
    return _new(group, ranks[group.rank() // size * size :][:size])


@cache
def _some(group: dist.ProcessGroup, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    level(group)
    return _new(group, list(ranks)) if dist.get_rank() in ranks else None


def _new(group: dist.ProcessGroup, ranks: list[int]) -> dist.ProcessGroup:
    return dist.new_group(ranks, use_local_synchronization=True, group_desc=group.group_desc)
