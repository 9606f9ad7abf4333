"""Checkpoints: a run that stops and goes on under another layout, and another number of ranks, is the run that went
through. What is on disk are the plain model's tensors under its own names, and a manifest that says so.

The long product of all layouts is for `make test-more`; each kind of cut is in one of the chains here.
"""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from resumed import FROZEN, SPECS, all_of, apart, build, cut, go, parts, stray, through
from safetensors.torch import load_file

from shardlab.model import Transformer, checkpoint
from shardlab.parallel import weights
from shardlab.specs import Layout
from shardlab.train import checkpoint as checkpoints
from shardlab.train import manifest, train

PIPED = dict(microbatches=2)  # what resumed.parts makes
DENSE = {
    4: [Layout(dp=2, tp=2), Layout(pp=2, dp=2, zero=1, schedule="interleaved", chunks=2, **PIPED),
        Layout(dp=2, tp=2, zero=3), Layout(dp=4, zero=2), Layout(cp=2, pp=2, **PIPED), Layout(tp=4),
        Layout(tp=2, pp=2, sp="keep", **PIPED), Layout(cp=2, dp=2, zero=1),
        Layout(pp=4, schedule="zero_bubble", **PIPED), Layout(dp=2, pp=2, order="tp-dp-pp", **PIPED)],
    2: [Layout(pp=2, **PIPED), Layout(tp=2, sp="again"), Layout(dp=2, zero=1), Layout(dp=2), Layout(cp=2)],
    3: [Layout(dp=3, zero=3), Layout(pp=3, **PIPED)], 1: [Layout()],
}
EXPERTS = {
    4: [Layout(dp=2, tp=2, ep=2, zero=1), Layout(dp=2, tp=2, ep=4, etp=1, zero=3),
        Layout(pp=2, dp=2, ep=2, zero=1, **PIPED), Layout(dp=4, ep=2, zero=2), Layout(cp=2, tp=2)],
    2: [Layout(dp=2, ep=2), Layout(tp=2, etp=1)], 3: [Layout(dp=3, zero=2)], 1: [Layout()],
}


def link(group, folder, layout, kind, optimizer, first):
    """One step more than the last checkpoint, from the initial weights where there is none; then the next one."""
    here = cut(layout, kind, optimizer, seed=0 if first else 9)
    found = checkpoints.latest(folder)
    done = 0 if found is None else checkpoints.load(found, here.model, here.optimizer)
    steps = go(here, layout, range(done, done + 1))
    checkpoints.save(folder, here.model, here.optimizer, done + 1)
    return steps, all_of(here)


CHAINS = {  # from four ranks to others: each kind of cut, written and read
    "dense": ("biases", "adamw", [DENSE[4][0], DENSE[2][0], DENSE[3][0], DENSE[1][0], DENSE[4][5]]),
    "tied": ("tied", "sgd", [DENSE[4][1], DENSE[2][3], DENSE[4][4], DENSE[2][1], DENSE[4][2]]),
    "experts": ("experts", "adamw", [EXPERTS[4][0], EXPERTS[2][0], EXPERTS[3][0], EXPERTS[4][1], EXPERTS[4][2]]),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_run_goes_on_under_other_layouts_and_numbers_of_ranks(pool, tmp_path, chain):
    """FAULTS Z10 (and Z9: moments equal). World 4 → 2 → 3 → 1, dp2·tp2 → pp2, ep2 → ep1, interleaved → dp2, cp2 → tp2,
    ZeRO 1, 2, 3: each step is that of the run that went through, and so is all that is there in the end."""
    kind, optimizer, layouts = CHAINS[chain]
    expected, full = through(kind, optimizer, len(layouts))
    for i, layout in enumerate(layouts):
        work = tmp_path, layout, kind, optimizer, i == 0
        ranks = [link(None, *work)] if layout.world_size == 1 else pool(layout.world_size).run(link, *work)
        assert max(stray(steps, expected[i : i + 1]) for steps, _ in ranks) < 1e-10, layout.degrees
    assert max(apart(ours, full) for _, ours in ranks) < 1e-10


def written(group, folder, layouts, kind, optimizer):
    for i, layout in enumerate(layouts):
        here = cut(layout, kind, optimizer)
        go(here, layout, range(2))
        checkpoints.save(folder / str(i), here.model, here.optimizer, 2)


def resumed(group, work, kind, optimizer, expected, full):
    """Two steps more from a checkpoint under a layout, for each such pair: the largest distances."""
    out = []
    for layout, each in work:
        here = cut(layout, kind, optimizer, seed=9)
        done = checkpoints.load(each, here.model, here.optimizer)
        steps = go(here, layout, range(done, 4))
        out.append((layout.degrees, each.parent.name, stray(steps, expected[done:]), apart(all_of(here), full)))
    return out


@pytest.mark.more
@pytest.mark.parametrize("kind,optimizer,layouts", [
    ("biases", "sgd", DENSE), ("tied", "adamw", DENSE), ("experts", "adamw", EXPERTS), ("experts", "sgd", EXPERTS),
])
def test_every_layout_writes_the_same_and_reads_what_another_has_written(pool, tmp_path, kind, optimizer, layouts):
    """What lies on the disk is the same tensors, whoever wrote them; so one read is enough for each reader."""
    expected, full = through(kind, optimizer, 4)
    pool(4).run(written, tmp_path, layouts[4], kind, optimizer)
    found = sorted(tmp_path.glob("*/step-00000002"))
    assert len(found) == len(layouts[4])
    first, *others = [[load_file(each / f"{what}.safetensors") for what in ("model", "optimizer")] for each in found]
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=1e-10)
    for world, some in layouts.items():
        work = list(zip(some, itertools.cycle(found[1:] + found[:1]))), kind, optimizer, expected, full
        for told in [resumed(None, *work)] if world == 1 else pool(world).run(resumed, *work):
            assert len(told) == len(some) and not [each for each in told if max(each[2:]) > 1e-10]


def low(group, folder, layouts):
    """bf16: under each layout what is loaded, beside what the writer had, and the writer's next step, gone through and
    taken up."""
    writer = cut(layouts[0], "biases", "adamw", dtype=torch.bfloat16)
    go(writer, layouts[0], range(2))
    path = checkpoints.save(folder, writer.model, writer.optimizer, 2)
    had, out = all_of(writer), []
    for layout in layouts:
        here = cut(layout, "biases", "adamw", dtype=torch.bfloat16, seed=9)
        checkpoints.load(path, here.model, here.optimizer)
        out.append(apart(all_of(here), had))
        if layout is layouts[0]:
            assert go(here, layout, range(2, 4)) == go(writer, layout, range(2, 4))
            out.append(apart(all_of(here), all_of(writer)))
        else:
            go(here, layout, range(2, 3))
    finer = {name for name, state in had if state == "master" and
             not torch.equal(had[name, state], had[name, ""].float())}
    return max(out), len(finer), {had[key].dtype for key in had if key[1] != "step" and key[1]}


@pytest.mark.parametrize("first", [0, 1])
def test_weights_of_16_bits_come_with_their_float32_copies(pool, tmp_path, first):
    """FAULTS Z7: to the bit, whoever keeps them, ZeRO or `masters`."""
    layouts = [Layout(dp=2, zero=3), Layout(tp=2), Layout(dp=2, zero=1), Layout(pp=2, **PIPED)]
    for most, finer, dtypes in pool(2).run(low, tmp_path, layouts[first:] + layouts[:first]):
        assert most == 0 and finer > 10 and dtypes == {torch.float32}


KINDS = {
    "SGD, not begun": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), amsgrad=True), "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam, "Adamax": torch.optim.Adamax, "Adadelta": torch.optim.Adadelta,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True), "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
}


def alone(kind, seed=0):
    """A plain model, some of it frozen, and an optimizer with two groups."""
    model = build("tied", seed)
    named = list(model.named_parameters())
    groups = [{"params": [p for _, p in named if p.dim() > 1]}, {"params": [p for _, p in named if p.dim() == 1]}]
    return model, KINDS[kind](groups)


@pytest.mark.parametrize("kind", KINDS)
def test_each_optimizers_states_come_back_to_the_bit(tmp_path, kind):
    model, optimizer = alone(kind)
    rate = None if kind == "AdamW" else lambda step: 1 / (1 + step)  # its own rate is a tensor
    train(model, optimizer, parts, range(0 if "not begun" in kind else 2), progress=False, rate=rate)
    path = checkpoints.save(tmp_path, model, optimizer, 2, seed=7)
    other, its = alone(kind, seed=9)
    for group in its.param_groups:
        group["lr"] = torch.tensor(5.0) if torch.is_tensor(group["lr"]) else 5.0  # not what counts
    assert checkpoints.load(path, other, its) == 2
    theirs, ours = optimizer.state_dict(), its.state_dict()
    assert theirs["param_groups"] == ours["param_groups"] and theirs["state"].keys() == ours["state"].keys()
    for i, states in theirs["state"].items():
        assert states.keys() == ours["state"][i].keys()
        for name, value in states.items():
            assert value.dtype == ours["state"][i][name].dtype and torch.equal(value, ours["state"][i][name]), name
    steps = [train(*both, parts, range(2, 4), progress=False, rate=rate)
             for both in ((model, optimizer), (other, its))]
    assert steps[0] == steps[1] and all(map(torch.equal, model.parameters(), other.parameters()))
    assert manifest.read(path)["extra"] == {"seed": 7}


def test_what_is_on_disk_is_plain(tmp_path):
    """FAULTS Z1, Z6: no padding, a tied table once, nothing of frozen weights but themselves; names, shapes, dtypes in
    the manifest; the folder is a Hugging Face folder."""
    here = cut(Layout(), "tied", "adamw")
    go(here, Layout(), range(1))
    path = checkpoints.save(tmp_path / "new" / "run", here.model, here.optimizer, 1, seed=3, note="ü")
    assert sorted(each.name for each in path.iterdir()) == ["config.json", "manifest.json", "model.safetensors",
                                                            "optimizer.safetensors"]
    names = {name for name, _ in here.model.named_parameters()}
    kept = load_file(path / "model.safetensors")
    assert kept.keys() == {f"model.{name}" for name in names}  # without lm_head.weight, which is tied
    states = load_file(path / "optimizer.safetensors")
    assert states.keys() == {f"{state}.model.{name}" for name in names - set(FROZEN)
                             for state in ("exp_avg", "exp_avg_sq")}
    assert all(states[f"exp_avg.{name}"].shape == kept[name].shape for name in kept if f"exp_avg.{name}" in states)
    said = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    assert said["step"] == 1 and said["extra"] == {"seed": 3, "note": "ü"} and said["layout"]["ranks"] == 1
    assert said["optimizer"]["kind"] == "AdamW" and said["optimizer"]["groups"][0]["weight_decay"] == 0.1
    assert said["tensors"]["model.norm.weight"] == {
        "shape": [16], "dtype": "float64", "group": 0,
        "states": {"exp_avg": ["float64", None], "exp_avg_sq": ["float64", None], "step": ["float32", 1.0]}}
    assert torch.equal(checkpoint.from_folder(path, torch.float64).norm.weight, here.model.norm.weight)


def test_a_model_that_no_hugging_face_type_fits_has_its_checkpoints_too(tmp_path):
    spec = replace(SPECS["experts"], attention_bias=True)
    model = Transformer(spec)
    optimizer = torch.optim.SGD(model.parameters())
    path = checkpoints.save(tmp_path, model, optimizer, 0)
    assert not (path / "config.json").exists() and not (path / "optimizer.safetensors").exists()
    other = Transformer(spec)
    assert checkpoints.load(path, other, torch.optim.SGD(other.parameters())) == 0
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_the_last_few_are_kept(tmp_path):
    model, optimizer = alone("SGD")
    assert checkpoints.latest(tmp_path / "none") is None and checkpoints.latest(tmp_path) is None
    for step in (8, 9, 10**8, 10, 11):  # of these one is another run's end, which nobody has removed
        checkpoints.save(tmp_path, model, optimizer, step, keep=2)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-00000010", "step-00000011", "step-100000000"]
    assert checkpoints.latest(tmp_path) == tmp_path / "step-100000000"


def exported(group, folder, work):
    out = []
    for i, (kind, layout) in enumerate(work):
        here = cut(layout, kind, "adamw")
        go(here, layout, range(1))
        found = checkpoints.save(folder / str(i), here.model, here.optimizer, 1)
        weights.save(here.model, folder / f"weights {i}")
        out.append(found)
    return out


def test_transformers_reads_a_checkpoint_and_an_export(pool, tmp_path):
    transformers = pytest.importorskip("transformers", reason="of the test extra")
    work = [("biases", DENSE[4][1]), ("experts", EXPERTS[4][1])]
    tokens = torch.arange(12).view(2, 6)
    for (kind, _), path, i in zip(work, pool(4).run(exported, tmp_path, work)[0], range(2), strict=True):
        plain = cut(Layout(), kind, "adamw")
        go(plain, Layout(), range(1))
        plain.model.eval()
        for folder in (path, tmp_path / f"weights {i}"):
            theirs = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float64, experts_implementation="eager")
            with torch.no_grad():
                torch.testing.assert_close(theirs(tokens).logits, plain.model(tokens), rtol=0, atol=1e-5)
