"""The small model that comes with the library: what it is, and that it has learned the text it was trained on."""

import tomllib
from pathlib import Path

import torch

from shardlab.cli.train import spec_from
from shardlab.model import checkpoint
from shardlab.model.pretrained import small
from shardlab.specs import ModelSpec
from shardlab.train.job import Job

HELD_OUT, LEARNED = 0.05, 1.7  # as the README's command has it; nats a byte, where it has 1.59


def test_it_is_small_and_its_heads_can_be_shared_by_two_three_and_four():
    spec = ModelSpec.from_config(small())
    assert all(spec.heads % p == spec.kv_heads % p == 0 for p in (2, 3, 4)) and spec.total == spec_from("small").total
    assert sum(each.stat().st_size for each in small().iterdir()) < 4e6
    assert {each.name for each in small().iterdir()} == {"README.md", "config.json", "model.safetensors"}
    assert "shardlab train" in (small() / "README.md").read_text()
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "data/small/*" in project["tool"]["setuptools"]["package-data"]["shardlab.model"]


def test_it_has_learned_what_text_it_never_saw_is_like():
    """A byte that could be any is ln 256 = 5.5 nats; by how often each comes in this text, 3.1."""
    model = checkpoint.from_folder(small())
    _, unseen = Job(spec=model.spec, held_out=HELD_OUT).split()
    windows = unseen[: 16 * 257].long().view(16, 257)
    with torch.no_grad():
        loss = model.loss(windows[:, :-1], windows[:, 1:]).item()
    assert loss < LEARNED


def test_it_writes_bytes_that_can_be_printed():
    model = checkpoint.from_folder(small())
    prompt = torch.tensor([list(b"The statement ")])
    made = bytes(model.generate(prompt, 80)[0].tolist())
    assert made.startswith(b"The statement ") and made.decode("ascii").replace("\n", " ").isprintable()
    assert len(set(made[14:].split())) > 3  # words, not one over and over
