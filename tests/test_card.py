"""A card is a real limit: exact, in one rank alone, there again in the next run, and explained when it is met."""

import contextlib
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from shardlab import card, comm
from shardlab.card import host
from shardlab.launch import RankError, launch, ranks, run
from shardlab.model import Transformer, checkpoint, pretrained
from shardlab.model.mapped import Mapped
from shardlab.parallel import tensor
from shardlab.specs import ModelSpec

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of one process")
MIB = 2**20
SAYS = "DefaultCPUAllocator: can't allocate memory: you tried to allocate {} bytes"


def data(mebibytes):
    """A tensor of so many MiB."""
    return torch.empty(round(mebibytes * MIB), dtype=torch.uint8)


def fits(mebibytes):
    try:
        data(mebibytes)
    except RuntimeError as error:
        assert SAYS.format(round(mebibytes * MIB)) in str(error)
        return False
    return True


def room(mebibytes):
    """Whether that is what is left, give or take 1.5 MiB. (An allocation at the very edge may end up in the heap.)"""
    return fits(mebibytes - 1.5) and not fits(mebibytes + 1.5)


@pytest.fixture(scope="module")
def two():
    """Two ranks with a card of 64 MiB each."""
    with ranks(2, card="64 MiB") as r:
        yield r


# what the limit is


@linux
@pytest.mark.parametrize("threads", [1, 2])
def test_the_limit_is_the_budget(threads):
    def measure(group):
        alone = fits(62.5), fits(65)
        held = []
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            while True:
                held.append(data(0.5))
        return alone, len(held) / 2

    for alone, many in launch(measure, 2, card="64 MiB", threads=threads):
        assert alone == (True, False) and 62 <= many <= 65  # small ones find the heap's reserve


@linux
def test_memory_that_is_freed_is_had_again(two):
    def use(group):
        generator = torch.Generator().manual_seed(0)
        for _ in range(40):  # of many sizes, in an order of their own: glibc alone would keep holes between them
            held = [data(5 * torch.rand((), generator=generator).item()) for _ in range(10)]
            del held[::2]
            held.append(data(30))
            held.clear()
        return fits(60)

    assert two.run(use) == [True, True]


@linux
def test_what_a_run_leaves_behind_is_on_the_card_and_garbage_is_not(two):
    def rubbish(group):
        ring = [data(50)]
        ring.append(ring)
        return room(14)

    def keep(group):
        torch.kept_by_a_test = data(30)
        return room(34)

    def drop(group):
        before = room(34)
        del torch.kept_by_a_test
        return before, room(64)

    assert [two.run(rubbish) for _ in range(5)] == [[True, True]] * 5
    assert two.run(keep) == [True, True] and two.run(drop) == [(True, True)] * 2


@linux
def test_a_file_mapped_for_reading_does_not_count(two, tmp_path):
    save_file({"x": torch.ones(32, MIB)}, tmp_path / "x")  # 128 MiB

    def read(group):
        x = Mapped(path).tensor("x")
        return x.sum().item(), card.resident().used, card.resident().tensors

    path = str(tmp_path / "x")
    for total, used, tensors in two.run(read):
        assert total == 32 * MIB and used < 4 * MIB and tensors < MIB


@linux
def test_a_group_of_ranks_is_had_for_little(two):
    def split(group):
        before = card.resident().used
        pair = torch.distributed.new_group([0, 1])
        return comm.all_reduce(torch.ones(4), group=pair).tolist(), card.resident().used - before

    for total, cost in two.run(split):
        assert total == [2.0] * 4 and cost < 5 * MIB


@linux
def test_ranks_without_a_card_and_this_process_have_no_limit(two):
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert two.run(lambda group: fits(65)) == [False, False]
    assert launch(lambda group: (fits(300), resource.getrlimit(resource.RLIMIT_DATA)), 1) == [(True, before)]
    assert fits(300) and resource.getrlimit(resource.RLIMIT_DATA) == before


# when it is met


def hold(group, last):
    weights = [torch.ones(2, MIB) for _ in range(6)]  # 48 MiB
    bias = torch.ones(MIB)
    if group.rank() == last:
        data(30)
    return [comm.all_reduce(torch.ones(1), group=group) for _ in range(4)], weights, bias


@linux
def test_one_rank_runs_out_and_ends_them_all_with_what_it_held():
    def where(group):
        return os.getpid()

    with ranks(2, card="64 MiB") as r:
        pids = r.run(where)
        start = time.monotonic()
        with pytest.raises(RankError) as raised:
            r.run(hold, 1)
        assert time.monotonic() - start < 10
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert r.run(lambda group: fits(60)) == [True, True]  # fresh ones
    text = str(raised.value)
    first, *lines = text.splitlines()
    assert raised.value.rank == 1 and first.startswith("rank 1 of 2 raised RuntimeError: [enforce fail")
    assert SAYS.format(30 * MIB) in first and "    data(30)" in lines
    note = next(i for i, line in enumerate(lines) if line.startswith("30.00 MiB more asked for. This rank's card of"))
    used, left = map(float, re.search(r"64 MiB: ([\d.]+) MiB used, ([\d.]+) MiB left", lines[note]).groups())
    assert 52 < used < 54 and abs(used + left - 64) < 0.02
    assert lines[note + 1].split("  ") == ["", "48.00 MiB", "6 × float32 (2, 1048576)"]
    assert lines[note + 2].split("  ") == ["", " 4.00 MiB", "1 × float32 (1048576,)"]
    assert "fewer bits a number, a cut over more ranks, or a larger card" in text[text.index("not in tensors") :]
    assert lines[-1].startswith("rank 0 │ ") and "all_reduce" in lines[-1]


@linux
def test_a_rank_that_catches_the_error_reports_and_goes_on(two):
    def survive(group):
        before = card.resident().used
        model = torch.nn.Linear(1024, 2048, bias=False)  # 8 MiB
        model(torch.ones(4, 1024)).sum().backward()  # and 8 MiB of gradients, which Python has not seen
        try:
            data(48)
        except RuntimeError as error:
            found, said = card.resident(), str(error)
        total = comm.all_reduce(torch.ones(MIB), group=group)
        return found, said, total.sum().item(), before

    for found, said, total, before in two.run(survive):
        assert SAYS.format(48 * MIB) in said and total == 2 * MIB
        assert found.budget == 64 * MIB and found.left == found.budget - found.used
        assert found.groups[0] == card.Group(2, "float32", (2048, 1024), 16 * MIB)
        assert 16 * MIB <= found.tensors <= found.used - before < 20 * MIB
        used, left = f"{found.used / MIB:.2f} MiB", f"{found.left / MIB:.2f} MiB"
        assert str(found).startswith(f"card of 64 MiB: {used} used, {left} left")


@linux
def test_what_autograd_alone_keeps_is_counted_and_said(two):
    def forward(group):
        x = torch.ones(MIB, requires_grad=True)
        y = x.exp().exp().exp().exp()  # each saves what it gives
        return card.resident(), y.shape

    for found, _ in two.run(forward):
        assert found.tensors < 8.1 * MIB and found.used > 20 * MIB
        assert "MiB  not in tensors that Python can reach" in str(found)


@linux
def test_an_error_that_another_led_to_shows_both_and_other_errors_have_no_report(two):
    def wrapped(group):
        try:
            data(65)
        except RuntimeError as error:
            raise ValueError("the model is too large") from error

    with pytest.raises(RankError, match="raised ValueError: the model is too large") as raised:
        two.run(wrapped)
    assert "65.00 MiB more asked for. This rank's card of 64 MiB" in str(raised.value)

    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("speechless")

    def fail(group):
        raise Mute

    with pytest.raises(RankError, match=r"raised .*Mute") as raised:
        two.run(fail)
    assert "card of" not in str(raised.value)


@linux
def test_a_full_card_ends_in_an_error_whoever_wants_more():
    """Python, C++ and gloo's threads ask for memory too; none of them may end the process."""
    def fill(group):
        full, errors, objects = [data(60)], [], []
        part = full[0][: 8 * MIB].view(torch.float32)
        for size in (2**19, 2**14, 2**10):
            with contextlib.suppress(RuntimeError, MemoryError):
                while True:
                    full.append(torch.empty(size, dtype=torch.uint8))
        for want in (lambda: comm.all_reduce(part, group=group), lambda: torch.distributed.new_group([0, 1]),
                     lambda: objects.extend(range(10**9))):
            try:
                want()
            except (RuntimeError, MemoryError) as error:
                errors.append(str(error))
        return errors, card.resident().used

    for errors, used in launch(fill, 2, card="64 MiB"):
        assert len(errors) == 3 and used > 62 * MIB, errors


@linux
def test_a_collective_on_a_full_card_is_refused_before_gloo_wants_memory():
    def fill(group):
        full = [data(60)]
        with contextlib.suppress(RuntimeError):
            while True:  # in mappings, which leave the heap its reserve: Python and C++ get what they need to refuse
                full.append(torch.empty(2**20, dtype=torch.uint8))
        part = full[0][: 8 * MIB].view(torch.float32)
        with pytest.raises(MemoryError, match="all_reduce needs up to 2 MiB besides its tensors"):
            comm.all_reduce(part, group=group)
        return len(full)

    assert min(launch(fill, 2, card="64 MiB")) >= 3


# what is asked for


@pytest.mark.parametrize(("given", "nbytes"), [
    (None, None), ("256 MiB", 2**28), ("1 GB", 10**9), (2**20, 2**20), (SimpleNamespace(memory=10**8), 10**8)])
def test_what_a_card_may_be(given, nbytes):
    assert card.budget(given) == nbytes and ranks(2, card=given).card == nbytes


@pytest.mark.parametrize(("given", "error", "words"), [
    ("lots", ValueError, "'lots' is no size: write a number and one of B, kB, MB, GB, KiB"),
    ("256 mib", ValueError, "'256 mib' is no size"),
    ("-1 GiB", ValueError, "'-1 GiB' is no size"),
    (0, ValueError, "a card of 0 B has no room for a function to run in: give at least 1,048,576 B = 1 MiB"),
    (-5, ValueError, "a card of -5 B has no room"),
    ("256 KiB", ValueError, "a card of 262,144 B has no room"),
    (True, TypeError, "card must be a size, bytes, or a CardSpec, not True: card='256 MiB'"),
    (2.5e9, TypeError, "not 2500000000.0"),
    (SimpleNamespace(memory=None), TypeError, "not namespace(memory=None)"),
    ("1000000 GiB", ValueError, "a card of 1000000 GiB can't be had from a machine of"),
])
def test_cards_that_can_not_be(given, error, words, monkeypatch):
    monkeypatch.setattr(run, "Crew", None)  # nothing may start
    with pytest.raises(error) as raised:
        launch(hold, 2, card=given)
    assert words in str(raised.value)


def test_a_rank_without_a_card_has_nothing_to_report(pool):
    def ask(group):
        with pytest.raises(ValueError, match=r"launch\(fn, 2, card='256 MiB'\)"):
            card.resident()

    pool(2).run(ask)


# where there is no limit, and in other hands


def test_a_platform_that_can_not_limit_says_so_at_every_launch_and_goes_on(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['resource'] = None")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(run, "_server", run.Server())

    def more(group):
        return data(65).nbytes, card.resident().tensors >= 0

    for _ in range(2):
        with pytest.warns(card.UnlimitedWarning) as warned:
            assert launch(more, 2, card="64 MiB") == [(65 * MIB, True)] * 2
        assert len(warned) == 1 and warned[0].filename == __file__
        assert "no card of 64 MiB for the ranks, which run without a limit: Linux has no" in str(warned[0].message)


@linux
def test_a_system_that_does_not_keep_to_its_limits_is_found_out(monkeypatch):
    monkeypatch.setattr(host, "_obeys", lambda: False)
    limit = card.Limit(64 * MIB)
    limit.prepare()
    assert "does not keep it to that" in limit.missing
    with limit:
        assert fits(70) and card.resident().budget == 64 * MIB


@pytest.mark.more
@linux
def test_under_torchrun_the_limit_is_there_while_the_function_runs(tmp_path, monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)  # what torchrun would say; it takes seconds longer
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent("""
        import sys, torch, torch.distributed as dist
        from shardlab.launch import launch
        dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1]), rank=0, world_size=1)
        def fits(mebibytes):
            try:
                return torch.empty(mebibytes * 2**20, dtype=torch.uint8) is not None
            except RuntimeError as error:
                return False
        def both(group):
            return fits(13), fits(16)
        def over(group):
            torch.empty(65 * 2**20, dtype=torch.uint8)
        before = torch.ones(50, 2**18)  # a tensor of this process, and so on its card
        found = [launch(both, 1, card="64 MiB"), launch(both, 1), fits(65)]
        try:
            launch(over, 1, card="64 MiB")
        except RuntimeError as error:
            print(found, *error.__notes__)
    """))
    command = [sys.executable, str(path), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("[[(True, False)], [(True, True)], True] \n65.00 MiB more asked for."), done.stderr


# a real model


@pytest.fixture(scope="module")
def folder():
    try:
        return pretrained.smollm2()
    except RuntimeError as error:
        pytest.skip(f"the weights of SmolLM2-135M are not here and can't be fetched: {error}")


def speak(group, folder, prompt):
    with torch.device("meta"):
        model = Transformer(ModelSpec.from_config(folder))
    checkpoint.load(tensor.cut(model, group), folder)
    loaded = card.resident()
    return model.generate(prompt, 6), loaded, card.resident()


@linux
def test_the_real_model_is_too_large_for_one_card_and_speaks_on_three(folder):
    """538 MB of weights on cards of 256 MiB."""
    words = pretrained.tokenizer(folder)
    prompt = torch.tensor([words.encode(pretrained.chat("What is the capital of France?")).ids])
    with pytest.raises(RankError) as raised:
        launch(speak, 1, folder, prompt, card="256 MiB", timeout=240)
    lines = str(raised.value).splitlines()
    assert "DefaultCPUAllocator: can't allocate memory" in lines[0]
    note = next(i for i, line in enumerate(lines) if "more asked for. This rank's card of 256 MiB" in line)
    assert lines[note + 1] == "  108.00 MiB  1 × float32 (49152, 576)"  # the embedding
    for said, loaded, after in launch(speak, 3, folder, prompt, card="256 MiB", timeout=240):
        assert "The capital of France is Paris" in words.decode(said[0].tolist())
        assert loaded.tensors < 172 * MIB and loaded.used - loaded.tensors < 4 * MIB  # weights: 171.1 MiB
        assert after.left > 64 * MIB  # for activations


@pytest.mark.more
def test_what_an_optimizer_imports_does_not_count_against_the_first_card():
    """Imported within the limit, torch._dynamo would take tens of MiB of it, in a program's first launch alone."""
    script = ("import sys\nfrom shardlab.launch import launch\n"
              "print(launch(lambda group: 'torch._dynamo' in sys.modules, 2, card='64 MiB'))\n")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.stdout == "[True, True]\n", done.stderr
