"""Channels between processes that are in no group together: what arrives, when, and what is said of an end."""

import socket
import statistics
import threading
import time

import pytest
import torch

from shardlab import comm
from shardlab.comm.channel import LENGTH, LONGEST, Channel, Closed, Listener, Pace, connect, raw
from shardlab.launch import launch
from shardlab.specs import LinkSpec


@pytest.fixture
def ends():
    """Both ends of a channel."""
    here, there = (Channel(sock, name) for sock, name in zip(socket.socketpair(), ("there", "here"), strict=True))
    yield here, there
    here.close()
    there.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.long, torch.bool])
def test_tensors_arrive_as_they_were(ends, dtype):
    here, there = ends
    x = torch.arange(12).view(3, 4).to(dtype)
    here.send({"of": "three", "numbers": [1, 2.5, None]}, [x, x.t(), x[:0], x[1, 1]])
    header, tensors = there.recv()
    assert header == {"of": "three", "numbers": [1, 2.5, None]}
    for came, sent in zip(tensors, [x, x.t(), x[:0], x[1, 1]], strict=True):
        assert came.dtype == dtype and came.shape == sent.shape and torch.equal(came, sent)


def test_messages_larger_than_the_socket_takes_come_in_order(ends):
    here, there = ends
    x = torch.arange(2**20)

    def send():
        for i in range(3):
            here.send({"number": i}, [x + i])

    sender = threading.Thread(target=send)
    sender.start()
    for i in range(3):
        header, (came,) = there.recv()
        assert header["number"] == i and torch.equal(came, x + i)
    sender.join()


def test_the_bytes_are_the_tensors_own():
    x = torch.tensor([1, -2], dtype=torch.int16)
    assert bytes(raw(x)) == b"\x01\x00\xfe\xff"
    raw(x)[0] = 3
    assert x[0] == 3


def test_an_end_is_heard_of(ends):
    here, there = ends
    here.send({"last": True})
    here.close()
    assert there.recv()[0] == {"last": True}
    with pytest.raises(Closed, match=r"^here has closed the channel$"):
        there.recv()
    with pytest.raises(Closed, match="here is gone"):
        for _ in range(3):
            there.send({})


def test_an_end_within_a_message_says_so():
    one, other = socket.socketpair()
    one.sendall(LENGTH.pack(100) + b"[{")
    one.close()
    with pytest.raises(Closed, match="after 2 of 100 bytes of a message"):
        Channel(other).recv()
    other.close()


def test_who_waits_hears_of_a_close_here(ends):
    here, _ = ends
    said = []

    def wait():
        with pytest.raises(Closed):
            here.recv()
        said.append("closed")

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.05)
    here.close()
    waiter.join(5)
    assert said == ["closed"]


def test_nothing_is_unpickled(ends):
    """What is not JSON, or claims to be no tensor, is an error and nothing else."""
    here, there = ends
    here._socket.sendall(LENGTH.pack(4) + b"\x80\x04N.")
    with pytest.raises(ValueError):
        there.recv()
    head = b'[{}, 0, [["load", []]]]'
    here._socket.sendall(LENGTH.pack(len(head)) + head)
    with pytest.raises((TypeError, ValueError)):
        there.recv()


def test_one_may_connect_before_the_other_listens(tmp_path):
    path, got = tmp_path / "door", []

    def late():
        time.sleep(0.05)
        listener = Listener(path)
        channel = listener.accept()
        got.append(channel.recv()[0])
        channel.close()
        listener.close()

    thread = threading.Thread(target=late)
    thread.start()
    channel = connect(path, "the door", 30)
    channel.send({"knock": 1})
    thread.join()
    channel.close()
    assert got == [{"knock": 1}]


def test_nobody_listens_for_long(tmp_path):
    with pytest.raises(TimeoutError, match=r"the door did not listen at .*door within 0.05 s"):
        connect(tmp_path / "door", "the door", 0.05)
    with pytest.raises(ValueError, match=f"{LONGEST} bytes.*TMPDIR"):
        connect(tmp_path / ("x" * 120), "the door", 0.05)


def test_a_closed_listener_lets_nobody_in(tmp_path):
    listener = Listener(tmp_path / "door")
    threading.Timer(0.05, listener.close).start()
    with pytest.raises(Closed, match="nobody can connect any more"):
        listener.accept()


# links that are slowed


@pytest.fixture
def pace(tmp_path):
    """A link of 1 MB/s and 50 ms, as two processes have it open."""
    link = LinkSpec(name="slow", per_direction=1e6, alpha=0.05)
    both = [Pace(link, tmp_path / "clocks") for _ in range(2)]
    yield both
    for each in both:
        each._nics._file.close()


def test_a_message_waits_for_both_its_ports(pace):
    """Bytes/β each, from when they are ready, however late that is asked; α on top of each, and not one behind the
    other."""
    here, there = pace
    start = time.monotonic() - 100
    out, into = 0, 1
    assert here.book(out, into, 1000, start) == pytest.approx((start + 0.001, start + 0.051))
    assert here.book(out, into, 1000, start) == pytest.approx((start + 0.002, start + 0.052))
    assert there.book(2, into, 1000, start) == pytest.approx((start + 0.003, start + 0.053))  # from another
    assert there.book(2, 3, 1000, start) == pytest.approx((start + 0.004, start + 0.054))
    assert here.book(out, 4, 1000, start) == pytest.approx((start + 0.003, start + 0.053))
    assert here.book(into, out, 1000, start)[0] == pytest.approx(start + 0.001)  # the other way there is room
    assert here.book(out, into, 1000, start + 1)[0] == pytest.approx(start + 1.001)


def test_pacing_does_not_drift(ends, pace):
    """20 messages that are ready at once take what their bytes take, though each is late by some of what the machine
    does besides."""
    here, there = ends
    x = torch.zeros(20_000, dtype=torch.uint8)  # 20 ms
    came = []

    def take():
        for _ in range(20):
            there.recv()
            came.append(time.monotonic())

    taker = threading.Thread(target=take)
    taker.start()
    start = time.monotonic()
    for _ in range(20):
        here.send({}, [x], pace[0].book(0, 1, x.nbytes, start))
        time.sleep(0.005)  # something else
    taker.join()
    late = [at - start - 0.05 - 0.02 * (i + 1) for i, at in enumerate(came)]
    assert min(late) > -1e-3 and statistics.median(late) < 0.015


def test_the_ledger_has_what_leaves_the_launch():
    def job(group):
        one, other = socket.socketpair()
        with comm.record() as ledger:
            Channel(one, "rank 1 of decode0").send({"only": "words"})
            Channel(one, "rank 1 of decode0").send({}, [torch.zeros(3, 4), torch.zeros(2, dtype=torch.int8)])
        one.close()
        other.close()
        return ledger

    (ledger,) = launch(job, 1)
    (entry,) = ledger.entries
    assert (entry.op, entry.axis, entry.payload, entry.wire, entry.derived) == ("send", "rank 1 of decode0", 50, 50,
                                                                               False)
    assert entry.end >= entry.start > 0 and "test_channel.py" in entry.site
    assert "rank 1 of decode0" in str(ledger) and ledger.to_chrome_trace()
