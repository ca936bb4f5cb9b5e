"""When a rank that waits keeps its core busy."""

from __future__ import annotations

import os
import time

import pytest

from mpipipe.environment import has_core_of_its_own
from mpipipe.transport.waiting import Waiter


@pytest.mark.parametrize(
    "ranks_on_node, cores, node_cores, own",
    [
        (1, 1, 64, True),  # one rank a node
        (1, 64, 64, True),
        (4, 1, 4, True),  # bound to one core each
        (4, 16, 64, True),  # bound to a socket's share
        (2, 2, 2, True),  # free, a core for each
        (64, 64, 64, True),
        (65, 64, 64, False),  # free, more ranks than cores
        (4, 2, 2, False),
        (3, 1, 2, False),  # bound, and more than there are cores
    ],
)
def test_which_ranks_have_a_core_of_their_own(ranks_on_node: int, cores: int, node_cores: int, own: bool) -> None:
    assert has_core_of_its_own(ranks_on_node, cores=cores, node_cores=node_cores) is own


@pytest.mark.parametrize(
    "policy, own_core, found",
    [
        ("auto", True, "yield"),
        ("auto", False, "nap"),
        *((policy, own_core, policy) for policy in ("spin", "yield", "nap") for own_core in (True, False)),
    ],
)
def test_auto_sees_whether_every_rank_has_a_core(policy: str, own_core: bool, found: str) -> None:
    assert Waiter(policy, own_core, 1.0).policy == found


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="one of auto, spin, yield, nap"):
        Waiter("sleep", True, 1.0)


POLICIES = ("spin", "yield", "nap")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_wait_ends_with_its_condition_or_its_time(policy: str) -> None:
    answers = iter([False] * 500 + [True])
    assert Waiter(policy, True, 60.0).wait(lambda: next(answers))
    assert not Waiter(policy, True, 0.01).wait(lambda: False)
    assert Waiter(policy, True, 1e-9).wait(lambda: True)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_alarm_ends_a_wait_early(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpipipe.transport.waiting.ALARM_EVERY_S", 0.001)
    asked: list[bool] = []

    def third_time() -> bool:
        asked.append(len(asked) == 2)
        return asked[-1]

    assert not Waiter(policy, True, 60.0).wait(lambda: False, third_time)
    assert asked == [False, False, True]
    assert Waiter(policy, True, 60.0).wait(lambda: True, third_time)
    assert len(asked) == 3


class Clock:
    """Time that passes only in naps and, 1 us each, when it is looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.naps: list[float] = []
        self.yields = 0
        monkeypatch.setattr(time, "monotonic", self._look)
        monkeypatch.setattr(time, "perf_counter_ns", lambda: int(self._look() * 1e9))
        monkeypatch.setattr(time, "sleep", self._nap)
        monkeypatch.setattr(os, "sched_yield", self._yield)

    def _look(self) -> float:
        self.now += 1e-6
        return self.now

    def _nap(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds

    def _yield(self) -> None:
        self.yields += 1


def test_naps_grow_with_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert not Waiter("nap", False, 1.0).wait(lambda: False)
    assert clock.yields > 20  # the first 100 us
    assert clock.naps[0] == 50e-6
    assert clock.naps[-1] == 500e-6
    waited = 0.0
    for nap in clock.naps:
        assert nap <= max(50e-6, (waited + 0.01) / 128)
        waited += nap
    assert clock.naps == sorted(clock.naps)
    assert 1900 < len(clock.naps) < 2700


@pytest.mark.parametrize("policy, yields", [("spin", False), ("yield", True)])
def test_only_naps_sleep(policy: str, yields: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert not Waiter(policy, False, 0.01).wait(lambda: False)
    assert not clock.naps
    assert (clock.yields > 0) is yields


def test_a_message_that_moves_is_not_slept_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that moves a piece takes 10 us; 30 of them bring the message, in one nap instead of 30."""
    clock = Clock(monkeypatch)
    pieces = 30

    def test() -> bool:
        nonlocal pieces
        if clock.naps:
            pieces -= 1
            clock.now += 10e-6
        return pieces == 0

    assert Waiter("nap", False, 60.0).wait(test)
    assert len(clock.naps) == 1


def test_a_slow_test_does_not_end_the_naps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def test() -> bool:
        clock.now += 10e-6
        return False

    assert not Waiter("nap", False, 0.1).wait(test)
    assert len(clock.naps) > 50
