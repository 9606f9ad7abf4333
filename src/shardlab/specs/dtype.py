"""Number formats: what one element weighs."""

from __future__ import annotations

from typing import NamedTuple


class Dtype(NamedTuple):
    """A number format: its short name in bills ("bf16"), PyTorch's name ("bfloat16"), and bytes per element."""

    name: str
    torch: str
    bytes: int


_DTYPES = (Dtype("fp64", "float64", 8), Dtype("fp32", "float32", 4), Dtype("bf16", "bfloat16", 2),
           Dtype("fp16", "float16", 2))


def dtype_of(name: object) -> Dtype:
    """The format called `name`, by its short or its PyTorch name, or PyTorch's own object of that name.

    Raises ValueError on an unknown one, with the names there are.
    """
    for known in _DTYPES:
        if str(name) in (known.name, known.torch, f"torch.{known.torch}"):
            return known
    raise ValueError(f"unknown dtype {name!r}: use one of {', '.join(f'{d.name} ({d.torch})' for d in _DTYPES)}")
