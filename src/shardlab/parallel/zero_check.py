"""What ZeRO can't cut, refused before anything is changed; and calls that would go wrong without a word."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import optim

from ..model.transformer import Transformer
from .gathering import parts

if TYPE_CHECKING:
    from .zero import Stage1

# whose update of a number looks at this number, its gradient and its states alone, so that slices can be stepped
ELEMENTWISE = (optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.RMSprop,
               optim.Adadelta, optim.ASGD, optim.Rprop)


def refuse(model: Transformer, optimizer: optim.Optimizer, stage: int) -> None:
    """Raise ValueError where `zero.shard` can't."""
    if stage not in (1, 2, 3):
        raise ValueError(f"ZeRO has stages 1, 2 and 3, not {stage!r}")
    if hasattr(model, "reducer"):
        raise ValueError("this model has a data axis already: shard the one without")
    if hasattr(model, "pipeline") and stage > 1:
        raise ValueError(f"ZeRO-{stage} reduce-scatters gradients in every backward pass, which with a pipeline is "
                         "once for each micro-batch: take stage 1, which does so once a step")
    kind = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE:
        raise ValueError(f"the ranks would step slices, which cut through matrices, and {kind} may look at a whole one "
                         "(as LBFGS, Adafactor and Muon do); updates known to be element by element are those of "
                         + ", ".join(each.__name__ for each in ELEMENTWISE))
    if optimizer.state:
        raise ValueError(f"this {kind} has begun: shard before the first step, then zero.load_state_dict brings its "
                         "states back")
    names = {parameter: name for name, parameter in model.named_parameters()}
    held = {parameter: None for group in optimizer.param_groups for parameter in group["params"]}
    if foreign := [parameter for parameter in held if parameter not in names]:
        raise ValueError(f"this {kind} has {len(foreign)} parameters that the model has not, the first of shape "
                         f"{tuple(foreign[0].shape)}: make it of the model's parameters, after tensor.cut")
    if missing := [name for parameter, name in names.items() if parameter.requires_grad and parameter not in held]:
        raise ValueError(f"this {kind} does not hold {missing[0]}, which is trained ({len(missing)} such): freeze it "
                         "with requires_grad_(False)")
    if stage == 3:
        list(parts(model))


def guard(reducer: Stage1, model: Transformer, optimizer: optim.Optimizer) -> None:
    """Have steps, and states and weights that are read or loaded, raise RuntimeError where they would be wrong."""

    def before_step(_, args: tuple, kwargs: dict) -> None:
        if len(args) > 1 or kwargs.get("closure") is not None:  # which would run after this
            raise RuntimeError("a sharded optimizer takes no closure: run backward and grads.finish, then step()")
        if reducer.used:  # the optimizer would step some of the gradients, or none
            raise RuntimeError("the gradients are not summed yet: call grads.finish(model) before optimizer.step()")
        if reducer.weights.opened:
            raise RuntimeError("inside zero.gathered(model) weights are read or loaded: step outside of it")

    def before_states(*_) -> None:
        if not reducer.whole:
            raise RuntimeError("this optimizer has slices of its states: zero.state_dict(model, optimizer) gives and "
                               "zero.load_state_dict(model, optimizer, state) takes the whole")

    def before_reading(*_) -> None:
        if reducer.partial and not reducer.weights.opened:
            raise RuntimeError("this rank has slices of the weights: with zero.gathered(model): …state_dict()…")

    def before_loading(*_) -> None:
        if (reducer.partial or reducer.low) and not reducer.weights.opened:
            raise RuntimeError("slices and master copies would not follow: with zero.gathered(model): "
                               "…load_state_dict(…)…")

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_state_dict_pre_hook(before_states)
    optimizer.register_load_state_dict_pre_hook(before_states)
    model.register_state_dict_pre_hook(before_reading)
    model.register_load_state_dict_pre_hook(before_loading)
