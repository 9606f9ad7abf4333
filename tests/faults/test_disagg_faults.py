"""What goes wrong between replicas in processes of their own: a user leaves, a process is killed or hangs, bytes are
damaged. No request is lost but the one that was given up, no text is another's, no block and no process is left.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from apart import BLOCKS, SIZE, alone, fresh, returned, right, serve, slow, workers
from clusters import Watched
from processes import eventually, family
from served import SIZES, build, expected, prompts, requests, texts

from shardlab.launch import RankError
from shardlab.serve import Request, prefill_first
from shardlab.serve.disagg import Workers
from shardlab.serve.metrics import finished
from shardlab.serve.replica import Replica, pools
from shardlab.specs import LinkSpec

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
TOKEN = 2 * 2 * SIZES["head_dim"] * 4  # bytes of a token in one layer, both heads
LONG = 40


def link(seconds_each):
    """A link on which a layer of a prompt of 40 tokens takes so long."""
    return LinkSpec(name="slow", per_direction=LONG * TOKEN / seconds_each)


def longs(count=1, new=6, **how):
    """Prompts of 40 tokens, in ten blocks of four, that are all different."""
    return [Request(i, prompts([LONG], seed=20 + i)[0], new, **how) for i in range(count)]


@pytest.fixture(scope="module")
def slowed():
    """Two replicas for prompts, which take 0.1 s a layer and 0.6 s after the last; one for the rest; 0.1 s a layer on
    the way."""
    with workers(2, 1, made=slow("gqa", 0.1, 0.6), link=link(0.1)) as world:
        yield world


# a user leaves


class Leaving(Watched):
    """The user of request 0 leaves once its transfer, or the request itself, is in that state."""

    def __init__(self, state, *args, **how):
        super().__init__(*args, after=self.leave_if, **how)
        self.state, self.went = state, False

    def leave_if(self, _):
        flight = self.flights.get(0)
        if self.went or flight is None:
            return
        transfer = flight.transfer
        state = transfer.state if transfer else "decoding" if not flight.moves else "computed" if flight.answer.tokens \
            else "begun"
        if state == self.state:
            self.went = self.abort(0)
            assert self.went


@pytest.mark.parametrize(("state", "layerwise"), [
    ("begun", False), ("streaming", True), ("sealed", False), ("acked", True), ("decoding", True)])
def test_a_user_leaves_and_every_block_comes_back(slowed, state, layerwise):
    """FAULTS SV27: at each state of the protocol; the others get their texts."""
    given = longs(2)
    cluster = Leaving(state, fresh(slowed), slowed, layerwise=layerwise)
    answers = cluster.run(given)
    assert cluster.went and not finished(answers[0]) and finished(answers[1])
    assert returned(cluster)
    assert answers[1].tokens == alone(given)[1]
    states = {transfer.number: transfer.state for transfer in cluster.transfers.values()}
    assert states.get(0) == {"begun": None, "decoding": "freed"}.get(state, "dropped") and states[1] == "freed"


def test_a_user_leaves_while_blocks_are_reserved_and_nothing_is_sent(slowed):
    """The target has the prompt's beginning from one source, and another computes it again, in chunks."""
    one, other, target = fresh(slowed)
    for each in (one, other):
        each.scheduler.policy = prefill_first(20)
    (prompt,) = prompts([LONG], seed=20)
    serve(slowed, [Request(1, prompt, 3)], [one, target])
    cluster = Leaving("reserved", [other, target], slowed)
    (answer,) = cluster.run([Request(0, [*prompt[:36], 4, 5, 6, 7], 3)])
    assert cluster.went and not answer.tokens and returned(cluster)
    assert [transfer.had for transfer in cluster.transfers.values()] == [36]


def test_a_late_write_is_nobodys(slowed):
    """FAULTS S8, S9: both sides have room for one request. Its user leaves while the cache is on its way, and the next
    request, which waits, gets its blocks: the text is its own."""
    given = longs(3)
    instances = fresh(slowed)[1:]  # one source
    for each in instances:
        each.pool.take(each.pool.blocks - 12)
    cluster = Unlooked("streaming", instances, slowed)
    answers = cluster.run(given)
    assert cluster.went and [finished(answer) for answer in answers] == [False, True, True]
    assert texts(answers[1:]) == alone(given)[1:]
    transfers = sorted(cluster.kept.values(), key=lambda each: each.number)
    for name in ("taken", "given"):
        assert len(set(getattr(transfers[0], name)) & set(getattr(transfers[1], name))) >= 8
    assert [each.pool.free for each in instances] == [12, 12]


class Unlooked(Leaving):
    """Of which some blocks are nobody's."""

    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        self.kept = {}

    def look(self):
        self.kept |= {each.transfer.serial: each.transfer for each in self.flights.values() if each.transfer}


# a process ends


class Killing(Watched):
    """A replica is killed, or stopped, once a transfer from or to it is on its way."""

    def __init__(self, name, *args, how=signal.SIGKILL, rank=-1, **more):
        super().__init__(*args, after=self.kill_if, **more)
        self.name, self.how, self.rank, self.killed = name, how, rank, False

    def kill_if(self, _):
        if not self.killed and any(flight.transfer and flight.transfer.state in ("streaming", "sealed") and
                                   self.name in (flight.source.name, flight.target.name)
                                   for flight in self.flights.values()):
            self.killed = True
            os.kill(self.world.crews.pids[self.name][self.rank], self.how)


def gone(pids, limit=20):
    deadline = time.monotonic() + limit
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.02)
    return True


@linux
def test_killed_in_mid_stream_a_replica_takes_nothing_with_it(tmp_path, monkeypatch):
    """A prefill worker, then a decode worker, then all is closed: every request is answered rightly by those who are
    left, and no process, folder or socket is."""
    before = family()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with workers(2, 2, made=slow("gqa", 0.05, 0.05), link=link(0.1)) as world:
        for name, left in (("prefill0", 3), ("decode1", 2)):
            cluster = Killing(name, fresh(world), world)
            answers = cluster.run([*requests(), *(Request(10 + r.number, r.prompt, 6) for r in longs(2))])
            assert cluster.killed and texts(answers[:6]) == expected()[0] and all(map(finished, answers))
            assert texts(answers[6:]) == alone(longs(2)) and returned(cluster)
            assert sum(answer.preempted for answer in answers) >= 1
            assert gone(world.crews.pids[name]) and len(world.instances()) == left == len(list(tmp_path.iterdir()))
        assert right(*serve(world, requests()))
    assert gone(pid for pids in world.crews.pids.values() for pid in pids)
    assert not list(tmp_path.iterdir()) and eventually(lambda: family() <= before)


@linux
@pytest.mark.more
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_of_two_is_killed_and_the_replica_is_gone(rank):
    with workers(2, 1, prefill_tp=2, made=slow("gqa", 0.05, 0.05), link=link(0.1)) as world:
        cluster = Killing("prefill0", fresh(world), world, rank=rank)
        assert right(cluster, cluster.run(requests())) and cluster.killed
        assert gone(world.crews.pids["prefill0"]) and len(world.instances()) == 2


@linux
def test_a_replica_that_hangs_is_ended(tmp_path):
    """Stopped, not killed: its transfers fail after `patience`, and since it does not let go of them, it goes itself.
    Those who send to others are not held up."""
    with workers(1, 2, made=slow("gqa", 0.05, 0.05), link=link(0.05), patience=1.5) as world:
        cluster = Killing("decode0", fresh(world), world, how=signal.SIGSTOP)
        answers = cluster.run(requests())
        assert right(cluster, answers) and cluster.killed
        assert any("not there after 1.5 s" in why for why in world.failed.values())
        assert gone(world.crews.pids["decode0"]) and len(world.instances()) == 2


@linux
def test_a_replica_that_hangs_in_a_step_is_ended():
    """Nothing is on its way to or from it: what it was at is answered by the other."""
    replicas = [Replica(name, BLOCKS, block_size=SIZE) for name in ("a", "b")]
    with Workers(build, replicas, patience=2.0, timeout=300) as world:
        stopped = []

        def stop(cluster):
            if not stopped and cluster.instances[0].working:
                stopped.append(True)
                os.kill(world.crews.pids["a"][0], signal.SIGSTOP)

        cluster = Watched(fresh(world), world, after=stop)
        answers = cluster.run(requests())
        assert right(cluster, answers) and stopped
        assert gone(world.crews.pids["a"]) and len(world.instances()) == 1


@linux
def test_with_the_parent_all_go(tmp_path):
    """kill -9 of the control plane, in the middle of a run."""
    script = tmp_path / "parent.py"
    script.write_text(f"""
import sys, tempfile
sys.path[:0] = {[str(Path(__file__).parents[1])]!r}
tempfile.tempdir = {str(tmp_path)!r}
from apart import fresh, slow, workers
from clusters import Watched
from served import requests
def said(cluster):
    if cluster.transfers:
        print(*(pid for pids in cluster.world.crews.pids.values() for pid in pids), flush=True)
with workers(1, 1, made=slow("gqa", 5.0, 5.0)) as world:
    Watched(fresh(world), world, after=said).run(requests())
""")
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    try:
        pids = list(map(int, process.stdout.readline().split()))
        assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
        assert len(list(tmp_path.iterdir())) == 3  # the script, and a folder for each replica
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert gone(pids)
    deadline = time.monotonic() + 20
    while len(list(tmp_path.iterdir())) > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [path.name for path in tmp_path.iterdir()] == ["parent.py"]


def test_without_anybody_left_it_says_so():
    with workers(1, 1, made=slow("gqa", 0.05, 0.05), link=link(0.1)) as world:
        class Both(Killing):
            def kill_if(self, _):
                if not self.killed and self.transfers:
                    self.killed = True
                    for name in ("prefill0", "decode0"):
                        world.crews.kill(name)

        with pytest.raises(RuntimeError, match="no instance is left to answer"):
            Both("prefill0", fresh(world), world).run(requests())


def test_an_error_in_a_replica_is_the_readers():
    """One that its code raises, not its machine: the rank's own traceback."""
    def made():
        model = build()
        model.layers[1].register_forward_pre_hook(stumble)
        return model

    def stumble(module, args):
        raise ArithmeticError("layer 1 stumbles")

    with workers(1, 1, made=made) as world:
        with pytest.raises(RankError, match="layer 1 stumbles"):
            serve(world, requests())
        with pytest.raises(RuntimeError, match=r"nothing more can be served here: .*layer 1 stumbles"):
            world.instances()


def test_after_their_end_replicas_serve_nothing():
    with workers(1, 1) as world:
        instances = fresh(world)
    with pytest.raises(RuntimeError, match="closed"):
        serve(world, requests(), instances)
    with pytest.raises(RuntimeError, match="closed"):
        world.instances()


@pytest.mark.parametrize(("how", "says"), [
    (dict(wire="int4"), "int4"), (dict(patience=float("nan")), "patience"), (dict(patience=0), "patience"),
])
def test_what_is_asked_wrongly_is_said_before_anything_starts(how, says):
    with pytest.raises(ValueError, match=says):
        Workers(build, [Replica("a", BLOCKS)], **how)
    with pytest.raises(ValueError, match="0 replicas"):
        Workers(build, [])
    with pytest.raises(ValueError, match="'prefil': use one of both, prefill, decode"):
        Replica("a", BLOCKS, "prefil")


def test_an_error_at_the_start_is_too():
    def made():
        raise FileNotFoundError("no weights here")

    with pytest.raises(RankError, match="no weights here"):
        workers(1, 1, made=made)


# bytes are damaged, sides do not fit


def damage(header, parts):
    """A changed byte in the first transfer's layer 1; the second's layer 2 does not come at all."""
    if header["serial"] == 1 and header["layer"] == 1:
        parts[0].view(-1)[5] += 1
    return (header["serial"], header["layer"]) != (2, 2)


@pytest.mark.parametrize("layerwise", [True, False], ids=["layer-wise", "in bulk"])
def test_what_did_not_arrive_whole_is_never_decoded(layerwise):
    """FAULTS SV26: no text is wrong, and what was damaged is sent again."""
    with workers(1, 1, spoil=damage) as world:
        cluster, answers = serve(world, requests(), layerwise=layerwise)
        assert right(cluster, answers)
        assert len(world.failed) == 2 and sum(answer.preempted for answer in answers) == 2
        one, other = world.failed.values()
        assert "rank 0 of decode0: layer 1 of tokens" in one and "its checksum differs" in one
        assert "has sent 3 messages, and 2 have come" in other


def damage_one_half(header, parts):
    """The second head of the first transfer, which another rank of the target holds."""
    if header["serial"] == 1 and header["heads"] == [1, 2]:
        parts[0].view(-1)[5] += 1
    return True


def test_one_rank_of_a_target_that_has_all_is_not_enough():
    with workers(1, 1, decode_tp=2, spoil=damage_one_half) as world:
        cluster, answers = serve(world, requests())
        assert right(cluster, answers) and sum(answer.preempted for answer in answers) == 1
        assert ["rank 1 of decode0: layer" in why for why in world.failed.values()] == [True]


@pytest.mark.parametrize(("other", "says"), [
    (dict(dtype="int8"), "prefill0 can't send its caches to decode0: one has numbers of fp32, the other int8"),
    (dict(dtype="bf16"), "numbers of fp32, the other bf16"),
])
def test_replicas_that_do_not_fit_fail_at_their_start(other, says):
    """FAULTS SV24: the client does not wait for what can't come."""
    before = family()
    replicas = [*pools(1, 0, blocks=20), Replica("decode0", 20, "decode", **other)]
    with pytest.raises(ValueError, match=says):
        Workers(build, replicas)
    assert eventually(lambda: family() <= before)


def test_names_tell_replicas_apart():
    with pytest.raises(ValueError, match="same name"):
        Workers(build, [Replica("a", 20), Replica("a", 20)])
