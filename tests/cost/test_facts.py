"""Every row of tests/data/facts.yaml, computed by the library."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from shardlab.cost import kv_per_token, memory, traffic
from shardlab.cost.comm import ring_hops, ring_wire
from shardlab.specs import Layout, ModelSpec, units

DATA = Path(__file__).parents[1] / "data"
ROWS = {row["id"]: row for row in yaml.safe_load((DATA / "facts.yaml").read_text(encoding="utf-8"))}
KIB, MIB, GIB = 2**10, 2**20, 2**30


def spec(name, **changes):
    return replace(ModelSpec.from_config(DATA / "configs" / f"{name}.json"), **changes)


SEVENTY, EIGHT = spec("llama-3.1-70b"), Layout(tp=8)
TOKEN = traffic(SEVENTY, EIGHT, batch=1, seq=1, dtype="bf16", backward=False, head="logits")
STEP = traffic(SEVENTY, EIGHT, batch=1, seq=1)
LAYER = [c for c in TOKEN.collectives if c.what in ("attention out", "mlp out")]


def printed(text, unit):
    """The number that a formatted size shows, which must be in `unit`."""
    return float(re.fullmatch(rf"([\d.]+) {unit}", text)[1])


COMPUTED = {
    "A000-tp-syncs": lambda: sum(c.count for c in LAYER) / SEVENTY.layers,
    "A002-70b-gib": lambda: printed(units.binary(70 * 10**9 * 2, digits=6), "GiB"),
    "A002-70b-l3": lambda: memory(SEVENTY, dtype="bf16").weights / GIB,
    "A002-vec": lambda: LAYER[0].payload / KIB,
    "A002-syncs": lambda: sum(c.count for c in LAYER),
    "A002-ring": lambda: LAYER[0].wire / KIB,
    "A002-layer": lambda: sum(c.wire for c in LAYER) / KIB,
    "A002-80layers": lambda: sum(c.count * c.wire for c in LAYER) / MIB,
    "A002-ring-steps": lambda: LAYER[0].hops,
    "A002-16gib": lambda: printed(units.binary(70 * 10**9 * 2 // 8), "GiB"),
    "A002-heads": lambda: next(t for t in SEVENTY.layer_tensors() if "q_proj" in t.name).local_shape(8)[0] / 128,
    "A002-kvtok": lambda: kv_per_token(SEVENTY, dtype="fp16") / KIB,
    "A002-per-req-card": lambda: 8192 * kv_per_token(SEVENTY, EIGHT) / GIB,
    "B5-l2-7b": lambda: spec("llama-2-7b").total,
    "B5-l2-70b": lambda: spec("llama-2-70b").total,
    "B5-l3-70b": lambda: SEVENTY.total,
    "B5-l31-405b": lambda: spec("llama-3.1-405b").total,
    "B5-l31-405b-16kv": lambda: spec("llama-3.1-405b", kv_heads=16).total,
    "B5-qwen25-0.5b": lambda: spec("qwen2.5-0.5b").total,
    "B5-qwen25-1.5b": lambda: spec("qwen2.5-1.5b").total,
    "B5-qwen25-3b": lambda: spec("qwen2.5-3b").total,
    "B5-qwen25-7b": lambda: spec("qwen2.5-7b").total,
    "B5-qwen25-14b": lambda: spec("qwen2.5-14b").total,
    "B6-l2-7b": lambda: kv_per_token(spec("llama-2-7b")),
    "B6-l2-13b": lambda: kv_per_token(spec("llama-2-13b")),
    "B6-l31-405b": lambda: kv_per_token(spec("llama-3.1-405b")),
    "B6-qwen25-0.5b": lambda: kv_per_token(spec("qwen2.5-0.5b")),
    "B6-qwen25-72b": lambda: kv_per_token(spec("qwen2.5-72b")),
    "B6-l2-70b-mha": lambda: kv_per_token(spec("llama-2-70b", kv_heads=64)),
    "B6-tp-replicate": lambda: kv_per_token(SEVENTY, Layout(tp=16)),
    "B7-busbw-allreduce": lambda: ring_wire("all_reduce", 1, 8),
    "B7-tp-train": lambda: sum(c.count for c in STEP.collectives if c.count == SEVENTY.layers) / SEVENTY.layers,
    "D-gpupoor-params": lambda: spec("llama-2-70b").total,
    "D-vllmfit-2": lambda: kv_per_token(spec("llama-2-7b")),
}


def test_every_row_is_computed():
    assert set(COMPUTED) == set(ROWS)
    assert ring_hops("all_reduce", 8) == ROWS["A002-ring-steps"]["expected"]


@pytest.mark.parametrize("name", COMPUTED)
def test_the_library_computes_the_row(name):
    row, value = ROWS[name], COMPUTED[name]()
    assert value == pytest.approx(row["expected"], rel=max(row["rel_tol"], 1e-12))
    if row.get("verdict") == "wrong":
        assert value != pytest.approx(row["claimed"], rel=row.get("claimed_tol", 0.05))
