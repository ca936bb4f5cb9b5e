"""What a poll and the opening ask of MPI, seen by an MPI that only counts."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpipipe.device import DeviceMemory
from mpipipe.errors import TransportError
from mpipipe.transport.mpi import MpiTransport
from mpipipe.transport.protocol import REPORT_TAG
from mpipipe.transport.waiting import Pace


class MpiError(RuntimeError):
    pass


class Library:
    """An MPI of ranks of one node with these bindings, whose time passes only in its probes: ``probe_ns`` each, or the
    next of ``moves`` while there are any. Its clock can be set.
    """

    BYTE, ANY_SOURCE, TAG_UB, COMM_TYPE_SHARED, ERRORS_RETURN = 0, -1, 1, 2, 3
    Exception = MpiError

    def __init__(self, bindings: list[set[int]], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 10**9
        self.probes = 0
        self.probe_ns = 300
        self.moves: list[int] = []
        self.broken = False
        size = len(bindings)
        node = SimpleNamespace(
            Get_size=lambda: size, Get_rank=lambda: 0, allgather=lambda mine: bindings, Free=lambda: None
        )
        own = SimpleNamespace(
            Set_errhandler=lambda handler: None,
            Get_rank=lambda: 0,
            Get_size=lambda: size,
            Split_type=lambda kind: node,
            Isend=None,
            Irecv=None,
            Iprobe=self._probe,
        )
        self.COMM_WORLD = SimpleNamespace(Get_attr=lambda key: 32767, Dup=lambda: own)
        monkeypatch.setitem(sys.modules, "mpi4py.MPI", self)
        monkeypatch.setattr(time, "perf_counter_ns", lambda: self.now)

    def Status(self) -> object:
        return object()

    def Get_library_version(self) -> str:
        return "counting"

    def _probe(self, source: int, tag: int) -> bool:
        assert (source, tag) == (self.ANY_SOURCE, REPORT_TAG)
        if self.broken:
            raise MpiError("MPI_ERR_OTHER")
        self.probes += 1
        self.now += self.moves.pop() if self.moves else self.probe_ns
        return False

    def probes_of(self, transport: MpiTransport, later_ns: int) -> int:
        """Probes of a poll that comes so much later."""
        self.now += later_ns
        before = self.probes
        transport.poll()
        return self.probes - before


def opened(monkeypatch: pytest.MonkeyPatch, bindings: list[set[int]] | None = None) -> tuple[MpiTransport, Any]:
    library = Library(bindings or [{0}, {1}], monkeypatch)
    return MpiTransport(library), library


def test_a_poll_calls_mpi_at_most_every_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, library = opened(monkeypatch)
    assert library.probes_of(transport, 0) > 0
    assert library.probes_of(transport, 10_000) == 0
    assert library.probes_of(transport, 980_000) == 0
    assert library.probes_of(transport, 10_001) > 0


def test_a_poll_with_nothing_to_move_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, library = opened(monkeypatch)
    for _ in range(5):
        assert library.probes_of(transport, 5_000_000) <= 11  # 3 us


def test_a_poll_goes_on_while_it_moves_data_and_a_while_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, library = opened(monkeypatch)
    library.moves = [10_000] * 2  # the first is not looked at
    assert 38 <= library.probes_of(transport, 5_000_000) <= 43  # 12 us: a call that was slow once
    library.probes_of(transport, 5_000_000)
    library.moves = [10_000] * 50
    assert 50 + 660 < library.probes_of(transport, 5_000_000) < 50 + 675
    found = [library.probes_of(transport, 5_000_000) for _ in range(8)]
    assert 660 < found[0] < 675  # 200 us of patience, then ever less
    assert found == sorted(found, reverse=True)
    assert found[-1] <= 11


def test_a_poll_ends_within_five_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, library = opened(monkeypatch)
    library.moves = [300, 10_000] * 20_000
    start = library.now
    library.probes_of(transport, 0)
    assert 4_900_000 < library.now - start < 5_100_000


def test_calls_that_are_always_slow_move_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI with more ranks than cores."""
    transport, library = opened(monkeypatch)
    library.probe_ns = 15_000
    for _ in range(5):
        library.probes_of(transport, 5_000_000)
    assert library.probes_of(transport, 5_000_000) <= 2


def test_memory_that_has_an_address_only_is_wrapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, library = opened(monkeypatch)
    sent: list[Any] = []
    made: list[tuple[int, int]] = []

    def wrap(address: int, nbytes: int) -> tuple[int, int]:
        made.append((address, nbytes))
        return made[-1]

    library.buffer = SimpleNamespace(fromaddress=wrap)
    transport._isend = transport._irecv = lambda what, peer, tag: sent.append(what[0])  # type: ignore[assignment]
    memory, array = DeviceMemory(4096, 100), np.zeros(3, dtype=np.uint8)
    for _ in range(3):
        transport.isend(memory, 1, 0)
    transport.irecv(memory, 1, 0)
    transport.isend(array, 1, 0)
    assert made == [(4096, 100)]
    assert sent[:4] == [(4096, 100)] * 4
    assert sent[4] is array
    monkeypatch.setattr("mpipipe.transport.mpi.MAX_PIECE_BYTES", 40)
    transport.isend(memory, 1, 0)
    assert made[1:] == [(4096, 40), (4136, 40), (4176, 20)]


def test_an_error_of_mpi_is_one_of_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, library = opened(monkeypatch)
    library.broken = True
    with pytest.raises(TransportError, match="MPI_ERR_OTHER") as caught:
        transport.poll()
    assert isinstance(caught.value.__cause__, MpiError)


@pytest.mark.parametrize(
    "bindings, policy",
    [
        ([{0, 1}, {0, 1}], "yield"),
        ([{0}, {1}], "yield"),
        ([{1}, {1}], "nap"),  # the launcher itself bound to one core
        ([{0, 1}] * 3, "nap"),
    ],
)
def test_the_bindings_of_all_ranks_of_a_node_decide(
    bindings: list[set[int]], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpipipe.environment.cpu_quota", lambda: None)
    transport, _ = opened(monkeypatch, bindings)
    assert transport._waiter.policy == policy
    transport.configure(timeout_s=1.0, wait="spin")
    assert transport._waiter.policy == "spin"


def test_the_pace_of_a_library_is_learned() -> None:
    pace = Pace()
    assert [pace.moved_data(ns) for ns in (200, 1_900, 5_000, 300, 2_100)] == [False, False, True, False, True]
    assert pace.is_quick
    assert [pace.moved_data(10_000) for _ in range(400)][-1] is False
    assert not pace.is_quick
    assert not pace.moved_data(20_000)
    assert pace.moved_data(60_000)
    assert not pace.moved_data(400)
    assert pace.is_quick
    assert pace.moved_data(10_000)
