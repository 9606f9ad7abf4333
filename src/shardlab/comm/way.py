"""One collective from the call to its result: checked, entered in the ledger, and sent the way that `use` asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from . import backend, headroom, made, shared, shm
from .algorithms import pick
from .disagreement import of_ranks
from .groups import group_of, members
from .mark import Mark
from .peers import Peers
from .settings import BACKEND, Settings, now


class Handle:
    """A collective under way. Keep neither reading nor writing its tensors until `wait()` has returned the result.

    What is made of messages, or goes through shared memory, is over when the verb returns, and `wait()` only gives the
    result; single messages are under way there too.
    """

    _dropped: ClassVar[list] = []

    def __init__(self, work: Any, mark: Mark, result: Callable[[], Any]):
        self._work, self._mark = work, mark
        self._result: Callable[[], Any] | None = result

    def wait(self) -> Any:
        """Block until the collective is done; the result tensor. Further calls return it again."""
        if self._work is not None:
            self._mark.enter()
            try:
                shm.meanwhile(self._work.wait) if isinstance(self._work, dist.Work) else self._work.wait()
            except Exception:
                self._mark.drop()
                raise
            self._mark.leave()
            self._work = None
        if self._result is not None:
            self._value, self._result = self._result(), None
        return self._value

    def __del__(self):
        if self._work is not None:  # not waited for: gloo gives up a message that nobody holds, and its receiver hangs
            self._dropped.append(self._work)


def collective(verb: str, tensor: torch.Tensor | None, group, async_op: bool, *, combines: bool = False,
               shape: tuple[int, ...] | None = None, back: torch.Tensor | None = None,
               gives: torch.Tensor | None = None, handed: torch.Tensor | None = None, detail: str = "",
               common: str = "", **how) -> Any:
    """Start the `verb` on `tensor`, and wait unless `async_op`; returns the result, or a Handle, whose wait() does.

    `combines`: the verb does arithmetic, else it moves bytes. `shape`: the result's; the tensor's own where left out.
    `back`: the tensor that the result is written to, for a verb in place; `gives`: what is returned instead of it.
    `handed`: what the ledger counts, if not `tensor`. `common`: what is the same on all ranks, if its shape is not.
    `how`: what the verb's functions in backend, made and shared take besides.
    """
    if verb != "barrier":
        refuse(verb, tensor)
    refuse_unwritable(verb, back)
    group, settings = group_of(group), now()
    mark = Mark(verb, handed if handed is not None else tensor, group, detail, common)
    mark.enter()
    try:
        algorithm, transport, staged = _way(verb, tensor, group, settings)
        mark.goes(algorithm, transport, staged)
        said = f"{mark.agreed}, {algorithm or 'its own'} by {transport}"
        _agree(said, group, settings, how.get("given", ()), how.get("taken", ()))
        with torch.no_grad():
            how = {name: _flat(value, combines, staged) if torch.is_tensor(value) else value
                   for name, value in how.items()}
            flat = _flat(tensor, combines, staged)
            work, result = _start(verb, flat, group, settings, mark, algorithm, transport, how)
    except Exception:
        mark.drop()
        raise

    def finish() -> Any:
        return gives if tensor is None or gives is not None else _shaped(result, tensor, shape, back)

    if work is None:
        mark.leave()
    handle = Handle(work, mark, finish)
    if not async_op:
        return handle.wait()
    if work is not None:
        mark.leave()
    return handle


def _start(verb, flat, group, settings, mark, algorithm, transport, how):
    """(work under way or None, result) by the backend's own, through shared memory, or by messages."""
    if not algorithm:
        headroom.ask(verb)
        if "op" in how:
            backend.refuse(verb, flat, how["op"], transport)
        return getattr(backend, verb)(flat, group, **how)
    if "op" in how:
        made.refuse(verb, flat, how["op"])
    if algorithm == "shared":
        result, written = getattr(shared, verb)(flat, mark.ranks, mark.agreed, **how)
        mark.writes(written)
        return None, result
    return None, getattr(made, verb)(flat, Peers(group, settings, mark, flat), algorithm, **how)


def _way(verb: str, tensor: torch.Tensor | None, group: dist.ProcessGroup, settings: Settings) -> tuple[str, str, bool]:
    """(algorithm, transport, whether staged through host memory): "" is the backend's own, "shared" shared memory's."""
    ranks, backends = members(group).ranks, members(group).backends
    own = backends.get(tensor.device.type if tensor is not None else "cpu") or next(iter(backends.values()))
    algorithm, transport = "", own
    place = check_topology(settings)
    if settings.transport == "shm":
        nodes = {place(rank) for rank in ranks}
        transport = "shm" if len(nodes) == 1 else "gloo+shm" if len(nodes) < len(ranks) else own
    if settings.algorithm != BACKEND or settings.topology or settings.transport == "shm":
        whole = settings.algorithm == BACKEND and transport == "shm" and hasattr(shared, verb)
        algorithm = "shared" if whole else pick(verb, settings.algorithm)
    return algorithm, transport, stages(tensor, own, settings, by_messages=bool(algorithm))


def stages(tensor: torch.Tensor | None, own: str, settings: Settings, by_messages: bool) -> bool:
    """Whether a device's tensor has to go through host memory: to all but NCCL, and to get a frame."""
    if tensor is None or tensor.device.type == "cpu":
        return False
    frames = settings.topology is not None or (settings.debug and by_messages)
    return own == "gloo" or settings.transport == "shm" or frames


def check_topology(settings: Settings) -> Callable[[int], int]:
    """The node of each global rank. Raises ValueError where the topology is of another number of ranks."""
    if settings.topology is None:
        return lambda rank: 0
    if settings.topology.ranks != dist.get_world_size():
        t = settings.topology
        raise ValueError(f"a topology of {t.nodes} × {t.per_node} = {t.ranks} ranks for {dist.get_world_size()}: "
                         "make them equal")
    return settings.topology.node


def _flat(tensor: torch.Tensor | None, combines: bool, staged: bool) -> torch.Tensor | None:
    """The tensor contiguous and flat, in host memory if `staged`: as bytes if they only move, as numbers otherwise."""
    if tensor is None or not combines or tensor.dtype == torch.bool:
        return None if tensor is None else flat_bytes(tensor, staged)
    return _row(tensor, staged)


def flat_bytes(tensor: torch.Tensor, staged: bool) -> torch.Tensor:
    """The tensor's bytes, flat and contiguous, in host memory if `staged`; the tensor's own memory where it can be."""
    return _row(tensor, staged).view(torch.uint8)


def _row(tensor: torch.Tensor, staged: bool) -> torch.Tensor:
    """The elements, one behind the other in memory: also of a lazily conjugated or negated tensor, whose memory has
    other values, and of a tensor of one element, which calls itself contiguous with a stride that is not 1."""
    x = tensor.detach().resolve_conj().resolve_neg()
    return (x.cpu() if staged else x).contiguous().as_strided((x.numel(),), (1,))


def _shaped(result: torch.Tensor, tensor: torch.Tensor, shape, back: torch.Tensor | None) -> torch.Tensor:
    """The flat result as the verb gives it, or written into `back`."""
    if back is not None:
        return written(result, back)
    return result.view(tensor.dtype).view(tensor.shape if shape is None else shape).to(tensor.device)


def written(flat: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """`back`, with the flat result in it, where it stands already unless `back` is strided or staged."""
    if flat.data_ptr() != back.data_ptr() or back.device != flat.device:
        with torch.no_grad():
            back.copy_(flat.view(back.dtype).view(back.shape))
    if not back.is_inference():
        torch.autograd.graph.increment_version(back)  # so that a backward which needs the old values says so
    return back


def _agree(text: str, group: dist.ProcessGroup, settings: Settings, given: Sequence[int], taken: Sequence[int]) -> None:
    """In debug mode, raise on every rank alike where the ranks of the group are not about to do the same thing, or one
    does not take as many bytes as another has for it: `given` and `taken`, by rank, of an all-to-all."""
    if not settings.debug:
        return
    said: list = [None] * group.size()
    shm.meanwhile(lambda: dist.all_gather_object(said, (text, given, taken), group))
    ranks = members(group).ranks
    texts = [each for each, _, _ in said]
    if len(set(texts)) > 1:
        raise ValueError(of_ranks(dict(zip(ranks, texts, strict=True))))
    for src, (_, given, _) in zip(ranks, said, strict=True):
        for dst, nbytes, (_, _, taken) in zip(ranks, given, said, strict=False):
            if nbytes != taken[ranks.index(src)]:
                raise ValueError(f"rank {src} has {nbytes:,} B for rank {dst}, which takes {taken[ranks.index(src)]:,} "
                                 f"from it: {text}; output_split_sizes must be the others' input_split_sizes")


def refuse_unwritable(verb: str, back: torch.Tensor | None) -> None:
    """Raise ValueError where the result can't be written to the tensor: several of its elements are one in memory, or
    it was made in inference mode and this is outside."""
    if back is None:
        return
    if not back.is_contiguous() and any(size > 1 and not stride
                                        for size, stride in zip(back.shape, back.stride(), strict=True)):
        raise ValueError(f"{verb} writes into its tensor, and that of {tuple(back.shape)} is expanded, with strides "
                         f"{back.stride()}: clone() it first")
    if back.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{verb} writes into its tensor, which was made in inference mode and can't be changed "
                         "outside of it: clone() it first")


def refuse(verb: str, tensor: object) -> None:
    """Raise TypeError on what is no tensor; ValueError on one without values in rows, and where the verb would cut it
    out of autograd's graph without a word."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{verb} takes a tensor, not {type(tensor).__name__}: torch.as_tensor makes one")
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        what = "on the meta device" if tensor.device.type == "meta" else f"laid out as {tensor.layout}"
        raise ValueError(f"{verb} moves the values of a dense tensor, and this one is {what}")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{verb} on a tensor that autograd tracks would drop its gradient: "
                         "use comm.regions, or detach() it first")
