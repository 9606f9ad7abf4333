"""Rotary position embeddings (RoFormer, arXiv:2104.09864), with the three ways in use of stretching them.

Dimensions i and i + d/2 of a head of size d form a pair (Hugging Face's layout), which position p turns by the angle
p · fᵢ. Nothing is stored: frequencies are a few numbers, computed from the spec wherever the positions are, so that a
model built on the meta device has nothing to lose.
"""

from __future__ import annotations

import math

import torch

from ..specs import ModelSpec, RopeScaling


def table(spec: ModelSpec, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin for `rotate`, each (1 or batch, 1, seq, rotated), of positions (seq,) or (batch, seq).

    Angles are computed in float32 whatever `dtype` is, as `transformers` does.
    """
    angles = torch.atleast_2d(positions).float().unsqueeze(-1) * frequencies(spec, positions.device)
    angles = torch.cat((angles, angles), -1).unsqueeze(1)
    scale = _magnitude(spec.rope_scaling)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn every pair of x (batch, heads, seq, head_dim) by its angle."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def frequencies(spec: ModelSpec, device: torch.device) -> torch.Tensor:
    """fᵢ = theta^(−2i/d), scaled as the spec says: (spec.rotated / 2,) float32, in radians a position."""
    d = spec.rotated
    f = 1.0 / spec.rope_theta ** (torch.arange(0, d, 2, dtype=torch.float32, device=device) / d)
    scaling = spec.rope_scaling
    if scaling is None:
        return f
    if scaling.kind == "linear":  # the same as dividing the positions
        return f / scaling.factor
    keep = _llama3_share(f, scaling) if scaling.kind == "llama3" else _yarn_share(spec, scaling, device)
    return (1 - keep) * f / scaling.factor + keep * f


def _llama3_share(f: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """How much of each frequency stays unstretched, 0 to 1, by the turns it makes in the original context.

    Llama 3.1's rule (github.com/meta-llama/llama-models, models/llama3/model.py, apply_scaling): none below
    `low_freq_factor` turns, all above `high_freq_factor`, a linear ramp between.
    """
    context, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
    assert context is not None and low is not None and high is not None  # RopeScaling sees to it
    turns = context * f / (2 * math.pi)
    return ((turns - low) / (high - low)).clamp(0, 1)


def _yarn_share(spec: ModelSpec, scaling: RopeScaling, device: torch.device) -> torch.Tensor:
    """The same for YaRN (arXiv:2309.00071, §3.2): a linear ramp over the index of the pair, not over its turns."""
    d, context = spec.rotated, scaling.original_max_position_embeddings
    assert context is not None  # RopeScaling sees to it

    def index(turns: float) -> float:
        """Where in 0 … d/2 the pair stands that makes so many turns in the original context."""
        return d * math.log(context / (2 * math.pi * turns)) / (2 * math.log(spec.rope_theta))

    first, last = index(scaling.beta_fast or 32), index(scaling.beta_slow or 1)  # 32 and 1: the paper's
    if scaling.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, d - 1)
    ramp = (torch.arange(d // 2, dtype=torch.float32, device=device) - first) / max(last - first, 0.001)
    return 1 - ramp.clamp(0, 1)


def _magnitude(scaling: RopeScaling | None) -> float:
    """What YaRN multiplies cos and sin by, to sharpen attention over a longer context (its eq. 22); otherwise 1."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def factor(weight: float) -> float:
        return 0.1 * weight * math.log(max(scaling.factor, 1.0)) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:  # DeepSeek's form: part of the factor is in its softmax already
        return factor(scaling.mscale) / factor(scaling.mscale_all_dim)
    return factor(1.0)
