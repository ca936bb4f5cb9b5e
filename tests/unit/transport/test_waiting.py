"""When a rank that waits keeps its core busy."""

from __future__ import annotations

import os

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
    "policy, local_size, mask, spins",
    [
        ("auto", 4, {3}, True),
        ("auto", 1, {0, 1}, True),
        ("auto", 9, {3}, False),
        ("spin", 9, {3}, True),
        ("yield", 1, {3}, False),
    ],
)
def test_auto_spins_where_every_rank_has_a_core(
    policy: str, local_size: int, mask: set[int], spins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: mask)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert Waiter(policy, local_size, 1.0).spins is spins


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="one of auto, spin, yield"):
        Waiter("nap", 1, 1.0)


@pytest.mark.parametrize("policy", ["spin", "yield"])
def test_a_wait_ends_with_its_condition_or_its_time(policy: str) -> None:
    answers = iter([False] * 500 + [True])
    assert Waiter(policy, 1, 60.0).wait(lambda: next(answers))
    assert not Waiter(policy, 1, 0.01).wait(lambda: False)


@pytest.mark.parametrize("policy", ["spin", "yield"])
def test_an_alarm_ends_a_wait_early(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpipipe.transport.waiting.ALARM_EVERY_S", 0.001)
    asked: list[bool] = []

    def third_time() -> bool:
        asked.append(len(asked) == 2)
        return asked[-1]

    assert not Waiter(policy, 1, 60.0).wait(lambda: False, third_time)
    assert asked == [False, False, True]
    assert Waiter(policy, 1, 60.0).wait(lambda: True, third_time)
    assert len(asked) == 3
