"""What ZeRO holds, to the unit of memory; what it refuses to cut, and to read or write where it is not whole."""

import pytest
import torch
from replicas import FROZEN, batch, build, cut, parameters, train, twins
from test_zero_state import KINDS, ZERO, apart

from shardlab.model import checkpoint
from shardlab.parallel import grads, zero


def storages(unit):
    return sum(memory.untyped_storage().nbytes() for memory in unit.rows.values())


def seen_rows(group, stage, tied):
    """How many rows of gradients a rank has at most, looked at whenever a gradient is complete; and after backward."""
    _, (twin, _) = twins(group, stage, frozen=["layers.3.unused", *FROZEN], layers=4, tied=tied)
    seen = []

    def note(_):
        seen.append(sum(bucket.row is not None for bucket in twin.reducer.buckets))

    for parameter in twin.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(note)
    tokens, labels = (x[group.rank(), 0] for x in batch(group.size(), 0))
    twin.loss(tokens, labels, 50).backward()
    note(None)
    return max(seen), len(twin.reducer.buckets), seen[-1]


@pytest.mark.parametrize("stage", ZERO)
def test_whole_gradients_are_there_until_they_are_sent(pool, stage):
    """Under stage 1 all stay. Under 2 and 3 one row is under way and one is being filled; and with tied weights, as
    norm, head and table are one unit, the norm's gradient waits for the table's."""
    for tied in (True, False):
        for most, count, left in pool(2).run(seen_rows, stage, tied):
            assert (most, left) == {1: (count, count), 2: (2, 0), 3: (2 + tied, 0)}[stage]


def seen_memory(group, tied, recompute):
    """The units whose memory a rank has: in each block's attention forward and backward, and after each pass."""
    _, (twin, ours) = twins(group, 3, dtype=torch.float32, recompute=recompute, tied=tied, layers=4)
    units, seen = twin.reducer.gathering.units, []

    def note(*_):
        seen.append([i for i, unit in enumerate(units) if storages(unit)])

    def noted():
        note()
        out = list(seen)
        seen.clear()
        return out

    for layer in twin.layers:
        layer.self_attn.register_forward_hook(note)
        layer.self_attn.register_full_backward_hook(note)
    out = {"before": noted()}
    tokens, labels = (x[group.rank(), 0] for x in batch(group.size(), 0))
    twin.loss(tokens, labels, 50)  # no backward comes to it
    noted()
    loss = twin.loss(tokens, labels, 50)
    out["forward"] = noted()
    loss.backward()
    out["backward"] = noted()
    grads.finish(twin)
    ours.step()
    with torch.no_grad():
        twin(tokens)
    out["evaluation"] = noted()
    whole = sum(memory.nbytes for unit in units for memory in unit.rows.values())
    assert sum(slice.nbytes for unit in units for slice in unit.held.values()) * group.size() == whole
    return out, [p.untyped_storage().nbytes() for p in twin.parameters()]


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("tied", [True, False])
def test_stage_3_holds_two_units_at_a_time(pool, tied, recompute):
    """Blocks are units 1 to 4; unit 0 is the table, tied with norm and head, which else are unit 5."""
    head = 0 if tied else 5
    forward = [[1, 2], [2, 3], [3, 4], sorted([4, head])]
    backward = [[3, 4], [2, 3], [1, 2], [1]]
    for out, left in pool(2).run(seen_memory, tied, recompute):
        assert out == {"before": [[]], "forward": [*forward, [head]], "evaluation": [*forward, []],
                       "backward": [*(units for units in backward for _ in range(2 if recompute else 1)), []]}
        assert set(left) == {4}  # of what is not gathered, one number a parameter is there, which is nan


def padding_only(group, stage, kind):
    """Three trained numbers over four ranks: the last has none of them, and no parameter for its optimizer."""
    names = [name for name, _ in build(0).named_parameters() if name != "norm.weight"]
    plain, twin = (build(0, frozen=names, hidden=3) for _ in range(2))
    theirs, ours = KINDS[kind](plain.parameters()), KINDS[kind](twin.parameters())
    cut(twin, ours, group, stage)
    for step in range(2):
        seen, _ = train(plain, theirs, twin, ours, group, step, 0.01)
    held = sum(len(each["params"]) for each in ours.param_groups)
    return held, max(seen.values()), parameters(plain, twin), apart(theirs.state_dict(), zero.state_dict(twin, ours))


@pytest.mark.parametrize("stage", ZERO)
def test_a_rank_that_holds_nothing_but_padding(pool, stage):
    for kind in KINDS if stage == 1 else ("AdamW",):
        outcomes = pool(4).run(padding_only, stage, kind)
        assert [held for held, *_ in outcomes] == [1, 1, 1, 0]
        assert all(max(distances) < 1e-9 for _, *distances in outcomes), (kind, outcomes)


def refused(group):
    model, other = build(0), build(1)
    trained = [p for p in model.parameters() if p.requires_grad]
    begun = torch.optim.AdamW(model.parameters())
    model.loss(torch.ones(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.long)).backward()
    begun.step()
    wrong = {
        "LBFGS": (torch.optim.LBFGS(model.parameters()), 1), "Adafactor": (torch.optim.Adafactor(trained), 1),
        "Muon": (torch.optim.Muon([p for p in trained if p.dim() == 2]), 2), "begun": (begun, 1),
        "foreign": (torch.optim.SGD([*model.parameters(), *other.parameters()]), 3),
        "missing": (torch.optim.SGD(trained[:-2]), 3), "stage": (torch.optim.SGD(trained), 4),
        "shared": (torch.optim.SGD(trained), 3),
    }
    said = {}
    for name, (optimizer, stage) in wrong.items():
        if name == "shared":
            model.layers[0].input_layernorm.weight = model.layers[1].input_layernorm.weight
            optimizer = torch.optim.SGD(model.parameters())
        before = [id(p) for each in optimizer.param_groups for p in each["params"]]
        with pytest.raises(ValueError, match=" ") as error:
            zero.shard(model, optimizer, group, stage)
        said[name] = str(error.value)
        assert before == [id(p) for each in optimizer.param_groups for p in each["params"]]
        assert not hasattr(model, "reducer") and not any(p.isnan().any() for p in model.parameters())
    return said


def test_what_zero_cannot_cut_is_refused_with_the_reason(pool):
    for said in pool(2).run(refused):
        for kind in ("LBFGS", "Adafactor", "Muon"):
            assert f"{kind} may look at a whole one" in said[kind] and "AdamW" in said[kind]
        assert "this AdamW has begun" in said["begun"] and "zero.load_state_dict" in said["begun"]
        assert "parameters that the model has not" in said["foreign"]
        assert "does not hold lm_head.weight" in said["missing"] or "which is trained (2 such)" in said["missing"]
        assert said["stage"] == "ZeRO has stages 1, 2 and 3, not 4"
        assert "blocks share parameters" in said["shared"] and "stage 2" in said["shared"]


def misused(group, folder, stage, dtype):
    """What is said where weights are not there, or would not stay; "" where all is well."""
    _, (model, optimizer) = twins(group, stage, dtype=dtype)
    del model.unused, model.layers[1].unused  # which no checkpoint knows
    weights = build(3, dtype).state_dict()

    def step():
        with zero.gathered(model):
            optimizer.step()

    said = {}
    for name, call in {"read": model.state_dict, "load": lambda: model.load_state_dict(weights, strict=False),
                       "save": lambda: checkpoint.save(model, folder / f"{group.rank()}-{stage}-{dtype}"), "step": step,
                       "other": lambda: zero.state_dict(model, torch.optim.AdamW(build(0).parameters()))}.items():
        try:
            call()
            said[name] = ""
        except (RuntimeError, ValueError) as error:
            said[name] = str(error)
    nans = torch.stack([p.isnan().all() for p in model.parameters()])
    return said, (nans.all() if stage == 3 else ~nans.any()).item()


@pytest.mark.parametrize(("stage", "dtype"), [(3, torch.float32), (1, torch.bfloat16), (1, torch.float32)])
def test_weights_are_read_and_loaded_inside_gathered(pool, tmp_path, stage, dtype):
    for said, numbers in pool(2).run(misused, tmp_path, stage, dtype):
        assert numbers
        assert "step outside of it" in said["step"] and "not the one that was given" in said["other"]
        for name, hint in {"read": "with zero.gathered(model)", "save": "save the whole model"}.items():
            assert hint in said[name] if stage == 3 else not said[name]
        loads = (stage, dtype) == (1, torch.float32)
        assert not said["load"] if loads else "with zero.gathered(model)" in said["load"]
