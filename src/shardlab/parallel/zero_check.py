"""What ZeRO can't cut, refused before anything is changed."""

from __future__ import annotations

from torch import nn, optim

# whose update of a number looks at this number, its gradient and its states alone, so that slices can be stepped
ELEMENTWISE = (optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.RMSprop,
               optim.Adadelta, optim.ASGD, optim.Rprop)


def refuse(model: nn.Module, optimizer: optim.Optimizer, stage: int) -> None:
    """Raise ValueError where `zero.shard` can't."""
    if stage not in (1, 2, 3):
        raise ValueError(f"ZeRO has stages 1, 2 and 3, not {stage!r}")
    if hasattr(model, "reducer"):
        raise ValueError("this model has a data axis already: shard the one without")
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
