"""The files that hold a model."""

from __future__ import annotations

from ..specs import ModelSpec, format_of


def checkpoint(spec: ModelSpec, dtype: object = None, copies: int = 0) -> int:
    """Bytes of the files that hold `spec` and its MTP modules, stored as `dtype` (None: as its weights are published).

    Modules share the embedding and the head of the model; `copies` is how often the files repeat the two all the same:
    DeepSeek-V3's do once (README_WEIGHTS.md). The files' headers are left out. Raises ValueError on an unknown format.
    """
    form = format_of(dtype or spec.stored)
    repeated = [(copies, t) for t in (*spec.first_tensors(), *spec.last_tensors()) if t.group in ("embedding", "head")]
    return sum(times * form.of(tensor.group, tensor.shape).nbytes(tensor.shape)
               for times, tensor in (*spec.counted(), *spec.mtp_counted(), *repeated))
