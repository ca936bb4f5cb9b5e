"""Loopback under the contract of every transport, and what only loopback does."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import transport_contract as contract

from mpipipe.errors import TransportError
from mpipipe.transport import Transport, run_ranks, solo


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", contract.CHECKS)
def test_loopback_keeps_the_contract(name: str, size: int) -> None:
    run_ranks(size, contract.CHECKS[name])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_wait_that_can_not_end_is_an_error(size: int) -> None:
    run_ranks(size, contract.check_a_wait_that_can_not_end)


def test_a_deadlock_says_who_waits_for_what() -> None:
    def work(transport: Transport) -> None:
        peer = 1 - transport.rank
        transport.wait(transport.irecv(np.zeros(1, dtype=np.uint8), peer, 0), f"{transport.rank}SEND_F3")

    with pytest.raises(TransportError, match="rank 0 waits for 0SEND_F3; rank 1 waits for 1SEND_F3"):
        run_ranks(2, work)


def test_a_rank_that_ends_early_is_no_hang() -> None:
    def work(transport: Transport) -> None:
        if transport.rank == 0:
            transport.wait(transport.irecv(np.zeros(1, dtype=np.uint8), 1, 0), "a message of rank 1")

    with pytest.raises(TransportError, match=r"1 rank.* already ended"):
        run_ranks(2, work)


def test_the_first_failure_is_the_one_that_is_raised() -> None:
    def work(transport: Transport) -> None:
        if transport.rank == 2:
            raise KeyError("the guilty rank")
        transport.wait(transport.irecv(np.zeros(1, dtype=np.uint8), 2, 0), "rank 2")

    with pytest.raises(KeyError, match="the guilty rank"):
        run_ranks(4, work)


def test_abort_ends_every_rank() -> None:
    def work(transport: Transport) -> None:
        if transport.rank == 1:
            transport.abort(3)
        transport.wait(transport.irecv(np.zeros(1, dtype=np.uint8), 1, 0), "rank 1")

    with pytest.raises(TransportError, match="aborted the job with code 3"):
        run_ranks(3, work)


def test_a_wait_for_what_never_comes_by_itself_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before a while without messages: it might still come."""
    monkeypatch.setattr("mpipipe.transport.loopback.QUIET_S", 0.2)

    def work(transport: Transport) -> None:
        if transport.rank == 0:
            transport.wait(contract.Ripening(10**9), "the kernel that does not end")
        transport.wait(transport.irecv(np.zeros(1, dtype=np.uint8), 0, 0), "a message of rank 0")

    begun = time.monotonic()
    with pytest.raises(TransportError, match="rank 0 waits for the kernel that does not end; rank 1 waits for a mess"):
        run_ranks(2, work)
    assert time.monotonic() - begun >= 0.2


def test_a_rank_may_have_computed_for_long_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpipipe.transport.loopback.QUIET_S", 0.2)

    def work(transport: Transport) -> None:
        time.sleep(0.3)
        transport.wait(contract.Ripening(50), "a kernel")

    run_ranks(1, work)


def test_a_request_made_of_requests_is_tested_in_its_rank_s_own_thread() -> None:
    threads: dict[int, set[str]] = {}

    class Watched(contract.Chained):
        def test(self) -> bool:
            threads.setdefault(self._transport.rank, set()).add(threading.current_thread().name)
            return super().test()

    run_ranks(3, lambda transport: transport.wait(Watched(transport, 10, 1), "a chain"))
    assert threads == {rank: {f"rank-{rank}"} for rank in range(3)}


def test_what_a_test_raises_is_raised_where_it_is_waited_for() -> None:
    class Broken(contract.Ripening):
        def test(self) -> bool:
            if super().test():
                raise KeyError("the guilty rank")
            return False

    def work(transport: Transport) -> None:
        if transport.rank == 1:
            transport.wait(Broken(5), "a kernel")
        transport.wait(transport.irecv(np.zeros(1, dtype=np.uint8), 1 - transport.rank, 0), "the other rank")

    with pytest.raises(KeyError, match="the guilty rank"):
        run_ranks(2, work)


def test_there_is_no_rank_beyond_the_last() -> None:
    with pytest.raises(TransportError, match="no rank 1 among 1"):
        solo().isend(np.zeros(1, dtype=np.uint8), 1, 0)


def test_a_run_repeats_itself_to_the_letter() -> None:
    """Which rank goes on when is a function of the messages alone."""

    def once() -> list[tuple[int, int]]:
        log: list[tuple[int, int]] = []

        def work(transport: Transport) -> None:
            before, after = (transport.rank - 1) % 4, (transport.rank + 1) % 4
            for k in range(5):
                log.append((transport.rank, k))
                send = transport.isend(np.zeros(1, dtype=np.uint8), after, k)
                transport.wait(transport.irecv(np.zeros(1, dtype=np.uint8), before, k), "the one before")
                transport.wait(send, "the one after")

        run_ranks(4, work)
        return log

    first = once()
    assert [rank for rank, _ in first[:4]] == [0, 1, 2, 3]
    assert all(once() == first for _ in range(20))
