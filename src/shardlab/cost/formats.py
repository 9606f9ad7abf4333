"""In which formats training keeps its numbers."""

from __future__ import annotations

from typing import NamedTuple

from ..specs import Dtype, Format, dtype_of


class Formats(NamedTuple):
    """In what the optimizer steps, in what gradients are kept, and those of a rank's own part of them."""

    stepped: Dtype
    gradients: Dtype
    part: Dtype


def formats_of(form: Format, master: str | None, gradients: str | None, shared: bool) -> Formats:
    """Those of weights stored as `form`. Half precision that is `shared` out among ranks has master weights in fp32
    always, and a rank's part of its gradients is summed up in the format that is stepped."""
    stored = dtype_of(form.rest.name)
    own = "fp32" if shared and stored.bytes < 4 else stored.name
    stepped = dtype_of(own if master is None else master)
    whole, part = (dtype_of(kept if gradients is None else gradients) for kept in (stored.name, stepped.name))
    return Formats(stepped, whole, part)
