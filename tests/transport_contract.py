"""The contract of every transport, written once: each ``check_*`` is called by all ranks of a job.

tests/contracts/test_transport.py runs them over loopback, tests/mpi over MPI.
"""

from __future__ import annotations

import numpy as np
import pytest

from mpipipe import collectives
from mpipipe.errors import (
    CheckpointNotFoundError,
    ConfigError,
    MessageMismatchError,
    MpipipeError,
    SetupError,
    TransportError,
)
from mpipipe.transport import COLLECTIVE_TAG, MESSAGE_TAGS, Transport

BIG = 3 << 20


def _bytes(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint8)


def _neighbours(transport: Transport) -> tuple[int, int]:
    return (transport.rank - 1) % transport.size, (transport.rank + 1) % transport.size


def check_a_ring(transport: Transport) -> None:
    before, after = _neighbours(transport)
    arrived = np.zeros(4, dtype=np.uint8)
    receive = transport.irecv(arrived, before, 7)
    send = transport.isend(_bytes(transport.rank, 1, 2, 3), after, 7)
    transport.wait(receive, "the ring")
    transport.wait(send, "the ring")
    assert arrived.tolist() == [before, 1, 2, 3]
    assert receive.test()
    assert send.test()


def check_that_sends_never_block(transport: Transport) -> None:
    """Every rank sends far more than an eager buffer holds before it posts a receive."""
    before, after = _neighbours(transport)
    sends = [transport.isend(np.full(BIG, k, dtype=np.uint8), after, k) for k in range(4)]
    for k in range(4):
        arrived = np.zeros(BIG, dtype=np.uint8)
        transport.wait(transport.irecv(arrived, before, k), f"big message {k}")
        assert (arrived == k).all()
    for send in sends:
        transport.wait(send, "a big send")


def check_that_one_tag_keeps_its_order(transport: Transport) -> None:
    before, after = _neighbours(transport)
    sends = [transport.isend(_bytes(k), after, 3) for k in range(50)]
    for k in range(50):
        arrived = _bytes(255)
        transport.wait(transport.irecv(arrived, before, 3), f"number {k}")
        assert arrived[0] == k
    for send in sends:
        transport.wait(send, "a small send")


def check_that_tags_keep_messages_apart(transport: Transport) -> None:
    """Received in the opposite order of sending, with receives posted before and after."""
    before, after = _neighbours(transport)
    tags = [0, 1, 17, MESSAGE_TAGS - 1, COLLECTIVE_TAG + 1]
    early = {tag: (np.zeros(2, dtype=np.uint8), tag) for tag in tags[:2]}
    receives = {tag: transport.irecv(memory, before, tag) for tag, (memory, _) in early.items()}
    sends = [transport.isend(_bytes(k, 9), after, tag) for k, tag in enumerate(tags)]
    for k, tag in reversed(list(enumerate(tags))):
        memory = early[tag][0] if tag in early else np.zeros(2, dtype=np.uint8)
        transport.wait(receives.get(tag) or transport.irecv(memory, before, tag), f"tag {tag}")
        assert memory.tolist() == [k, 9]
    for send in sends:
        transport.wait(send, "a tagged send")


def check_an_empty_message(transport: Transport) -> None:
    before, after = _neighbours(transport)
    receive = transport.irecv(np.empty(0, dtype=np.uint8), before, 5)
    send = transport.isend(np.empty(0, dtype=np.uint8), after, 5)
    transport.wait(receive, "nothing")
    transport.wait(send, "nothing")


def check_that_test_never_blocks(transport: Transport) -> None:
    before, after = _neighbours(transport)
    arrived = _bytes(0)
    receive = transport.irecv(arrived, before, 11)
    collectives.barrier(transport)
    assert not receive.test()
    collectives.barrier(transport)
    send = transport.isend(_bytes(42), after, 11)
    transport.wait(receive, "the late message")
    transport.wait(send, "the late send")
    assert arrived[0] == 42


def check_polls(transport: Transport) -> None:
    """With nothing open, with open requests whose other half is missing, and with long messages: a poll never blocks
    and takes nothing away.
    """
    before, after = _neighbours(transport)
    transport.poll()
    arrived = np.zeros(BIG, dtype=np.uint8)
    receive = transport.irecv(arrived, before, 12)
    transport.poll()
    collectives.barrier(transport)
    send = transport.isend(np.full(BIG, transport.rank + 1, dtype=np.uint8), after, 12)
    for _ in range(100):
        transport.poll()
    transport.wait(receive, "the polled message")
    transport.wait(send, "the polled send")
    assert (arrived == before + 1).all()
    transport.poll()


def check_that_a_complete_request_stays_so(transport: Transport) -> None:
    before, after = _neighbours(transport)
    arrived = _bytes(0, 0)
    receive, send = transport.irecv(arrived, before, 14), transport.isend(_bytes(7, transport.rank), after, 14)
    for request in (receive, send):
        transport.wait(request, "a small message")
        assert [request.test() for _ in range(3)] == [True] * 3
        transport.wait(request, "what is there already")
    assert arrived.tolist() == [7, before]


class Chained:
    """A request made of requests, as an engine has them: each message that has arrived sends the next one on, from
    inside ``test``. Complete when ``links`` of them have arrived and those sent on were taken.
    """

    def __init__(self, transport: Transport, links: int, tag: int) -> None:
        self._transport, self._left, self._tag = transport, links, tag
        self.peer, self._after = _neighbours(transport)
        self._memory = _bytes(0, 0)
        self._sends = [transport.isend(_bytes(links, transport.rank), self._after, tag)]
        self._receive = transport.irecv(self._memory, self.peer, tag)

    def test(self) -> bool:
        while self._left and self._receive.test():
            assert self._memory.tolist() == [self._left, self.peer]
            self._left -= 1
            if self._left:
                note = _bytes(self._left, self._transport.rank)
                self._sends.append(self._transport.isend(note, self._after, self._tag))
                self._receive = self._transport.irecv(self._memory, self.peer, self._tag)
        return not self._left and all(send.test() for send in self._sends)


def check_a_wait_for_a_request_made_of_requests(transport: Transport) -> None:
    for links in (1, 20):
        chained = Chained(transport, links, 16)
        transport.wait(chained, "a chain of messages")
        assert chained.test()
        transport.wait(chained, "what is there already")


class Ripening:
    """Complete by itself, after some tests, as the end of a kernel is."""

    peer = 0

    def __init__(self, tests: int) -> None:
        self.left = tests

    def test(self) -> bool:
        self.left -= self.left > 0
        return self.left == 0


def check_a_wait_for_what_comes_by_itself(transport: Transport) -> None:
    """Also while the other ranks wait for a message of this one."""
    before, after = _neighbours(transport)
    if transport.rank % 2 == 0:
        transport.wait(Ripening(200), "a kernel")
    receive = transport.irecv(_bytes(0), before, 18)
    send = transport.isend(_bytes(1), after, 18)
    transport.wait(receive, "the rank before")
    transport.wait(Ripening(5), "a kernel")
    transport.wait(send, "the rank after")


def check_local_ranks(transport: Transport) -> None:
    """The tests run on one node."""
    found = collectives.all_gather_objects(transport, [transport.local_rank, transport.local_size])
    assert sorted(found) == [[rank, transport.size] for rank in range(transport.size)]


def check_that_there_is_no_rank_beyond_the_last(transport: Transport) -> None:
    for peer in (transport.size, -7):
        with pytest.raises(TransportError, match=f"rank {peer}"):
            transport.isend(_bytes(1), peer, 15)
        with pytest.raises(TransportError, match=f"rank {peer}"):
            transport.irecv(_bytes(1), peer, 15)


def check_that_a_wrong_size_is_an_error(transport: Transport) -> None:
    before, after = _neighbours(transport)
    for expected in (3, 9):
        receive = transport.irecv(np.zeros(expected, dtype=np.uint8), before, 13)
        send = transport.isend(np.zeros(6, dtype=np.uint8), after, 13)
        with pytest.raises(MessageMismatchError):
            transport.wait(receive, "a message of another size")
        transport.wait(send, "the send")
        collectives.barrier(transport)


def check_all_gather(transport: Transport) -> None:
    size = transport.size
    for shape, dtype in (((1,), np.float64), ((3, 2), np.int32), ((0,), np.float32), ((1000,), np.uint8)):
        mine = np.full(shape, transport.rank + 1, dtype=dtype)
        rows = collectives.all_gather(transport, mine)
        assert rows.shape == (size, *shape)
        assert rows.dtype == dtype
        for rank in range(size):
            assert (rows[rank] == rank + 1).all()


def check_objects(transport: Transport) -> None:
    found = collectives.all_gather_objects(
        transport, {"rank": transport.rank, "text": "é" * transport.rank, "none": None}
    )
    assert [entry["rank"] for entry in found] == list(range(transport.size))
    assert found[-1]["text"] == "é" * (transport.size - 1)


def check_agreement(transport: Transport) -> None:
    """An error of one rank is the same error on all, of the same class and with the same attributes."""
    rank, last = transport.rank, transport.size - 1
    assert collectives.agree(transport, lambda: f"of {rank}") == f"of {rank}"
    assert collectives.on_first_rank(transport, lambda: [rank, None]) == [0, None]

    def fail(error: Exception) -> None:
        if rank == last:
            raise error

    asked = ConfigError("no such thing", file="a.toml", key="run.dir", value=3, allowed=["x", "y"])
    with pytest.raises(ConfigError) as caught:
        collectives.agree(transport, lambda: fail(asked))
    assert str(caught.value) == str(asked)
    assert (caught.value.key, caught.value.value, caught.value.allowed) == ("run.dir", 3, ["x", "y"])
    assert caught.value.seen_alike
    others = [] if last == 0 else [f"Seen on rank {last} only, of {transport.size} ranks."]
    assert getattr(caught.value, "__notes__", []) == others
    for error, kind in ((KeyError("odd"), MpipipeError), (PermissionError(13, "not yours"), SetupError)):
        with pytest.raises(MpipipeError, match=type(error).__name__) as found:
            collectives.agree(transport, lambda error=error: fail(error))
        assert type(found.value) is kind
        assert found.value.seen_alike

    def gone() -> None:
        raise CheckpointNotFoundError("gone")

    with pytest.raises(CheckpointNotFoundError, match=r"^gone"):
        collectives.on_first_rank(transport, gone)


def check_sums_in_rank_order(transport: Transport) -> None:
    """1e16 + 1 - 1e16 is 0 or 1 in float64, by the order."""
    values = [1e16, 1.0, -1e16, 3.0]
    mine = np.array([values[transport.rank % 4]])
    total = collectives.sum_in_rank_order(collectives.all_gather(transport, mine))
    expected = 0.0
    for rank in range(transport.size):
        expected += values[rank % 4]
    assert total[0] == expected


def check_clocks(transport: Transport) -> None:
    """One machine, one clock: the offset is within the round trip."""
    sample = collectives.compare_clocks(transport)
    assert abs(sample.offset_ns) <= sample.rtt_ns
    assert sample.rtt_ns < 5_000_000_000


CHECKS = {name: check for name, check in sorted(globals().items()) if name.startswith("check_")}


def check_a_wait_that_can_not_end(transport: Transport) -> None:
    """Not among CHECKS: a loopback world does not go on after a deadlock."""
    before, _ = _neighbours(transport)
    with pytest.raises(TransportError, match="the message that no one sends"):
        transport.wait(transport.irecv(_bytes(0), before, COLLECTIVE_TAG + 2), "the message that no one sends")
