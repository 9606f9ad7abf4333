"""What the account of a pipeline predicts is what its ranks count: every message and collective of a step, every byte
of weights, gradients and states, and the bytes kept for backward, looked at after every pass."""

import weakref

import pytest
import torch
from measure import Live

from shardlab import comm, schedule, show
from shardlab.cost.pipeline import pipeline as bill_of
from shardlab.model.transformer import Transformer
from shardlab.parallel import execute, grads, mesh, pipeline, tensor
from shardlab.specs import Layout, ModelSpec

SIZES = dict(hidden=16, layers=5, heads=4, kv_heads=2, head_dim=4, ffn=29, vocab=53)
BATCH, SEQ = 3, 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


class Kept:
    """The memory that autograd has saved and not let go of, parameters left out."""

    def __init__(self, model):
        self.parameters = {p.untyped_storage()._cdata for p in model.parameters()}
        self.alive = weakref.WeakSet()
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda held: held.tensor)

    def pack(self, x):
        held = Held(x)
        self.alive.add(held)
        return held

    def nbytes(self, others):
        """Of what is saved and of the `others`, each memory once."""
        memory = {x.untyped_storage()._cdata: x.untyped_storage().nbytes()
                  for x in (*(held.tensor for held in self.alive), *others)}
        return sum(n for key, n in memory.items() if key not in self.parameters)


class Held:
    def __init__(self, tensor):
        self.tensor = tensor


def watched(kept, seen):
    """The executor's rank, noting what is kept after every pass: saved, received, or put off with its dY."""

    class Watched(execute._Rank):
        def __init__(self, *args):
            super().__init__(*args)
            self.do |= {kind: self.noting(self.do[kind]) for kind in schedule.action.COMPUTES}

        def noting(self, do):
            def act(action):
                do(action)
                inputs = [x for pair in self.live.values() for x in pair if isinstance(x, torch.Tensor)]
                late = [x for each in self.later.values() for _, *two in each._parts for x in two]
                seen.append(kept.nbytes([*inputs, *late]))
            return act

    return Watched


def step(_, spec, orders, dtype, recompute, tp, sp, weights, frozen, transport):
    """A step, recorded; what is kept after each of this rank's passes, and what it holds at the end."""
    ranks = mesh.build(pp=len(orders), tp=tp)
    torch.manual_seed(0)
    model = Transformer(spec, recompute).to(DTYPES[dtype])
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    if tp > 1:
        model = tensor.cut(model, ranks.get_group("tp"), sp)
    numbers = torch.randint(0, spec.vocab, (schedule.size(orders)[1], 2, BATCH, SEQ))
    parts = [(tokens.clone(), labels.clone()) for tokens, labels in numbers]  # in memory of their own
    plain, seen = execute._Rank, []
    with comm.use(transport=transport), comm.record() as ledger:
        model = pipeline.cut(model, ranks.get_group("pp"), orders, weights)
        kept = Kept(model)
        execute._Rank = watched(kept, seen)
        try:
            with kept.hooks:
                execute.run(model, orders, parts)
        finally:
            execute._Rank = plain
        grads.finish(model)
        grads.clip_grad_norm_(model, 1.0)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained) if trained else None
    if optimizer:
        optimizer.step()
    states = [s for state in optimizer.state.values() for s in state.values()] if optimizer else []
    held = {"parameters": sum(p.numel() for p in model.parameters()), "weights": size(model.parameters()),
            "gradients": size(p.grad for p in trained), "states": size(states)}
    return ledger, seen, held


def size(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def rows(ledger):
    return sorted((e.axis, e.op, e.phase, e.payload) for e in ledger.entries)


def check(pool, name, p, microbatches, dtype="fp32", recompute=None, tp=1, sp=False, weights=None, frozen=(),
          transport="backend", **sizes):
    spec, orders = ModelSpec(**(SIZES | sizes)), schedule.SCHEDULES[name](p, microbatches)
    bill = bill_of(spec, orders, batch=BATCH, seq=SEQ, layout=Layout(tp, sp=sp), dtype=dtype, recompute=recompute,
                   weights=weights, frozen=frozen)
    outcomes = pool(p * tp).run(step, spec, orders, dtype, recompute, tp, sp, weights, frozen, transport)
    for rank, (ledger, seen, held) in enumerate(outcomes):
        mine, traffic = bill[rank // tp], bill.traffic(rank // tp, start=True, clip=True)
        assert rows(ledger) == sorted((c.axis, c.op, c.phase, c.payload) for c in traffic.collectives
                                      for _ in range(c.count)), rank
        assert show.compare(traffic.to_dict()["collectives"], ledger.to_dicts())
        sent = {phase: ledger.where(axis="pp", op="send", phase=phase) for phase in ("forward", "backward")}
        assert (sent["forward"].payload, sent["backward"].payload) == (mine.forward, mine.backward)
        assert sum(len(each.entries) for each in sent.values()) == mine.messages
        assert held == {kind: getattr(mine, kind) for kind in held}, rank
        assert seen[-1] == 0  # all is let go of
        if not frozen:
            assert max(seen) == mine.activations, (rank, seen)
        else:
            assert max(seen) <= mine.activations
    return bill


SCHEDULES = [("gpipe", 4), ("1f1b", 5), ("interleaved", 4), ("zero_bubble", 5), ("dualpipe_v", 8)]


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize(("name", "microbatches"), SCHEDULES)
def test_every_byte_of_a_pipeline(pool, name, microbatches, recompute):
    """Tied and not; of five layers, eight stages leave some without any."""
    tied = recompute == "full"
    check(pool, name, 2, microbatches, recompute=recompute, tied=tied)
    check(pool, name, 4, microbatches, recompute=recompute, tied=not tied,
          transport="shm" if tied else "backend")


@pytest.mark.parametrize("sp", [False, "keep", "again"])
def test_every_byte_of_a_pipeline_of_cut_layers(pool, sp):
    """15 tokens over two ranks: a slice has a row of padding. Both halves of backward put off cut layers' gradients."""
    check(pool, "zero_bubble", 2, 3, tp=2, sp=sp, tied=True, qk_norm=True)
    check(pool, "1f1b", 2, 3, tp=2, sp=sp, recompute="full", dtype="fp64", kv_heads=1)
    check(pool, "gpipe", 2, 2, tp=2, sp=sp, frozen=("embed_tokens", *(f"layers.{i}" for i in (0, 1, 2, 4))))


def test_every_byte_where_stages_are_uneven_or_frozen(pool):
    """Ends that leave no layers in their stages, in half precision, which norms copy; a stage with nothing to train."""
    check(pool, "interleaved", 2, 4, dtype="bf16", recompute="selective", weights=(9, 1, 1, 1, 1, 1, 9), tied=True)
    check(pool, "zero_bubble", 2, 3, frozen=("embed_tokens", "layers.1.mlp"), tied=True)
    check(pool, "1f1b", 2, 3, frozen=("layers.3", "layers.4", "norm", "lm_head"))


def peak(group, spec, orders, seq, recompute):
    torch.manual_seed(0)
    model = pipeline.cut(Transformer(spec, recompute), group, orders)
    parts = [tuple(pair) for pair in torch.randint(0, spec.vocab, (schedule.size(orders)[1], 2, BATCH, seq))]
    with Live() as live:
        execute.run(model, orders, parts)
    return live.peak


@pytest.mark.parametrize("recompute", [None, "full"])
def test_the_most_within_a_pass_is_at_the_loss(pool, recompute):
    """On the last rank, where the vocabulary is large."""
    spec, orders = ModelSpec(**SIZES | dict(vocab=997, ffn=64)), schedule.gpipe(2, 2)
    bill = bill_of(spec, orders, batch=BATCH, seq=400, recompute=recompute)
    assert pool(2).run(peak, spec, orders, 400, recompute)[1] == pytest.approx(bill[1].peak, rel=0.05)
