"""Rotary embeddings and their scalings against those of `transformers`."""

import pytest
import torch

from shardlab.model import rope
from shardlab.specs import ModelSpec, RopeScaling

transformers = pytest.importorskip("transformers")

SCALINGS = {
    "default": None,
    "linear": RopeScaling("linear", 4.0),
    "llama3": RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": RopeScaling("yarn", 4.0, 4096),
    "yarn, its own ramp": RopeScaling("yarn", 16.0, 2048, beta_fast=20.0, beta_slow=2.0, truncate=False),
    "yarn, DeepSeek's magnitude": RopeScaling("yarn", 40.0, 4096, mscale=1.0, mscale_all_dim=0.7),
    "yarn, a magnitude given": RopeScaling("yarn", 4.0, 4096, attention_factor=1.25),
    "yarn that shortens": RopeScaling("yarn", 0.5, 4096),
}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("theta,head_dim", [(1e4, 64), (5e5, 128), (1e6, 6)])
def test_cos_and_sin_are_those_of_transformers(scaling, theta, head_dim):
    spec = ModelSpec(
        hidden=64, layers=1, heads=2, kv_heads=2, head_dim=head_dim, ffn=8, vocab=8, rope_theta=theta,
        rope_scaling=scaling, max_positions=32768,
    )  # fmt: skip
    fields = {} if scaling is None else {k: v for k, v in vars(scaling).items() if v is not None}
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=2, head_dim=head_dim, max_position_embeddings=32768,
        rope_parameters={"rope_type": fields.pop("kind", "default"), "rope_theta": theta, **fields},
    )  # fmt: skip
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    positions = torch.tensor([[0, 1, 7, 100, 511], [3, 0, 2, 8000, 20000]])
    pairs = zip(rope.table(spec, positions, torch.float32), theirs(torch.zeros(1), positions), strict=True)
    for ours, expected in pairs:
        assert ours.shape == (2, 1, 5, head_dim)
        assert (ours[:, 0, :, :] - expected)[positions < 1000].abs().max() < 2e-5
        assert (ours[:, 0, :, :] - expected).abs().max() < 5e-3  # float32 angles of 20,000 rad are that coarse


def test_a_rotation_turns_pairs_half_a_head_apart_and_keeps_lengths():
    spec = ModelSpec(hidden=8, layers=1, heads=1, kv_heads=1, head_dim=8, ffn=8, vocab=8)
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    y = rope.rotate(x, *rope.table(spec, torch.arange(5), x.dtype))
    pairs, turned = (torch.complex(z[..., :4], z[..., 4:]) for z in (x, y))
    angles = torch.arange(5).double()[:, None] * 10000.0 ** (-torch.arange(4) / 4)
    assert (turned - pairs * torch.polar(torch.ones_like(angles), angles)).abs().max() < 1e-6


def test_no_positions_are_no_angles_in_the_same_shape():
    """A stage of a pipeline that has nothing of a step still goes through its layers."""
    spec = ModelSpec(hidden=8, layers=1, heads=1, kv_heads=1, head_dim=8, ffn=8, vocab=8)
    for positions, batch in ((torch.empty(0, dtype=torch.long), 1), (torch.empty(2, 0, dtype=torch.long), 2)):
        assert [x.shape for x in rope.table(spec, positions, torch.float32)] == [(batch, 1, 0, 8)] * 2
