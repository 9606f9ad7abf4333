"""Process groups along named axes: which ranks stand together for which cut."""

from __future__ import annotations

import math

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def build(**axes: int) -> DeviceMesh:
    """A mesh over all ranks with the named axes and their sizes, the last axis over neighbouring ranks.

    `build(dp=2, tp=2).get_group("tp")` is this rank's group for tensor parallelism: ranks (0, 1) or (2, 3).
    Every rank must call it, at the same point of its program. Raises ValueError where the product of the sizes is not
    the world size.
    """
    world = dist.get_world_size()
    if math.prod(axes.values()) != world:
        product = " × ".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(f"{product} makes {math.prod(axes.values())} ranks, and there are {world}")
    backend = dist.get_backend()
    device = "cuda" if "nccl" in backend else "cpu"
    # naming the backend keeps torch from lending the world's own group to an axis that spans it: each axis has its name
    return init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes),
                            backend_override=dict.fromkeys(axes, backend))


def blocks(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """This rank's block of `size` neighbouring ranks of `group`, as a group of its own; all its ranks must call it.

    Raises ValueError where `size` does not divide the group.
    """
    p = group.size()
    if p % size:
        raise ValueError(f"a group of {p} ranks has no blocks of {size}")
    if size == p:
        return group
    ranks = dist.get_process_group_ranks(group)
    mine = ranks[group.rank() // size * size :][:size]
    return dist.new_group(mine, use_local_synchronization=True, group_desc=group.group_desc)
