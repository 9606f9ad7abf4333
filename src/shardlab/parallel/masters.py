"""Float32 copies of weights that have 16 bits, for the optimizer to step (Micikevicius et al., arXiv:1710.03740, §3.1).

A bf16 number has 8 significant bits: what adds less than 1/512 of it changes nothing, and most updates are smaller. In
the copy they add up until they show. ZeRO keeps its own, of slices; this is for the other layouts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim

from ..model.transformer import Transformer
from .zero import LOW
from .zero_state import MASTER


def keep(model: Transformer, optimizer: optim.Optimizer) -> Transformer:
    """Let `optimizer` step float32 copies of the trained 16-bit parameters of `model`, plain or cut; returns the model.

    The last of the cuts, before the first step. Train as ever: backward, `grads.finish`, `grads.clip_grad_norm_`, then
    `optimizer.step`, which turns gradients into float32 and rounds the copies into the weights, and
    `optimizer.zero_grad`, which sets gradients to None. The optimizer's states have one more, "master", as ZeRO's have
    (`zero.state_dict`). Copies follow weights that are loaded. Raises ValueError where the model has copies already,
    ZeRO's or these, or is on the meta device, and where the optimizer has begun or is of another model.
    """
    if getattr(getattr(model, "reducer", None), "shards", False) or hasattr(model, "masters"):
        raise ValueError("this model has float32 copies already: ZeRO keeps its own, and masters.keep is for once")
    if optimizer.state:
        raise ValueError(f"this {type(optimizer).__name__} has begun: keep masters before the first step, then "
                         "load_state_dict brings its states back")
    held = [each for group in optimizer.param_groups for each in group["params"]]
    if foreign := len(set(held) - set(model.parameters())):
        raise ValueError(f"this {type(optimizer).__name__} has {foreign} parameters that the model has not: make it of "
                         "the model's parameters, after it is cut")
    if any(each.is_meta for each in held):
        raise ValueError("there is nothing to copy on the meta device: give the model memory, then make the optimizer")
    model.masters = Masters(optimizer)  # type: ignore[assignment]
    return model


class Masters:
    """The copies: `order` are the model's parameters in each of the optimizer's groups, `stepped` what is stepped of
    each, a float32 copy or itself."""

    def __init__(self, optimizer: optim.Optimizer):
        self.order: list[list[nn.Parameter]] = [list(group["params"]) for group in optimizer.param_groups]
        self.stepped = {each: nn.Parameter(each.detach().float()) if _low(each) else each
                        for group in self.order for each in group}
        self._known = {each: each._version for each in self._copied()}  # the weights that the copies belong to
        for group, parameters in zip(optimizer.param_groups, self.order, strict=True):
            group["params"] = [self.stepped[each] for each in parameters]
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_state_dict_post_hook(self._states)
        optimizer.register_load_state_dict_pre_hook(self._loading)
        optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]  # which knows the parameters, not the copies

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The optimizer's: all gradients become None."""
        for each, mine in self.stepped.items():
            each.grad = mine.grad = None

    def _copied(self) -> list[nn.Parameter]:
        return [each for each, mine in self.stepped.items() if mine is not each]

    @torch.no_grad()
    def _before_step(self, _, args: tuple, kwargs: dict) -> None:
        if len(args) > 1 or kwargs.get("closure") is not None:  # which would run after this
            raise RuntimeError("an optimizer with master copies takes no closure: run backward and grads.finish, then "
                               "step()")
        for each, mine in self.stepped.items():
            if mine is not each:
                mine.grad = None if each.grad is None else each.grad.float()
            elif _low(each):
                raise RuntimeError(f"a parameter {tuple(each.shape)} of 16 bits was frozen when masters were kept, and "
                                   "is trained now: it has no copy")
        self._renew()

    @torch.no_grad()
    def _renew(self) -> None:
        """Let copies follow weights that have changed since; the others keep what 16 bits can't hold."""
        for each in self._copied():
            if each._version != self._known[each] and not torch.equal(each, self.stepped[each].to(each.dtype)):
                self.stepped[each].copy_(each)

    @torch.no_grad()
    def _after_step(self, *_) -> None:
        for each in self._copied():
            each.copy_(self.stepped[each])
            self._known[each] = each._version
            self.stepped[each].grad = None

    def _numbers(self) -> dict[int, nn.Parameter]:
        """The parameters by their number in the optimizer's `state_dict`."""
        return dict(enumerate(each for group in self.order for each in group))

    def _states(self, _, state: dict[str, Any]) -> None:
        self._renew()
        for i, each in self._numbers().items():
            if (mine := self.stepped[each]) is not each:  # in a new dict: what is there is the optimizer's own
                state["state"][i] = {**state["state"].get(i, {}), MASTER: mine.detach()}

    @torch.no_grad()
    def _loading(self, _, state: dict[str, Any]) -> dict[str, Any]:
        """Take the copies out of the states, and the weights from the copies."""
        numbers, rest = self._numbers(), {}
        for i, states in state["state"].items():
            if MASTER in states and (each := numbers.get(i)) is not None and self.stepped[each] is not each:
                self.stepped[each].copy_(states[MASTER])
                each.copy_(self.stepped[each])
                self._known[each] = each._version
            rest[i] = {name: value for name, value in states.items() if name != MASTER}
        return {**state, "state": {i: states for i, states in rest.items() if states}}


def _low(parameter: nn.Parameter) -> bool:
    """Whether small updates of it would be lost."""
    return parameter.requires_grad and parameter.dtype in LOW
