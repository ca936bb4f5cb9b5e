"""While a rank computes, its messages go on: it polls between layers, and between operations without a message."""

from __future__ import annotations

from typing import Any

import little
import pytest

from mpipipe.trainer import Trainer
from mpipipe.transport import Transport, run_ranks


class Counting:
    """A transport that counts polls, and those while nothing is open."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.polls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def poll(self) -> None:
        self.polls += 1


def polls(schedule: str, layers: int, partition: list[int]) -> list[int]:
    """Of each rank in one step of 4 microbatches, after one in which forms were agreed."""

    def work(transport: Transport) -> int:
        counting = Counting(transport)
        config = little.config(schedule=schedule, sequences=4, pipeline__partition=partition)
        trainer = Trainer(
            config, [little.linear() for _ in range(layers)], little.square_loss, transport=counting
        )
        trainer.step(little.batch(0))
        before = counting.polls
        trainer.step(little.batch(1))
        return counting.polls - before

    return run_ranks(len(partition), work)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_a_rank_polls_between_its_layers(schedule: str) -> None:
    few, many = polls(schedule, 3, [1, 2]), polls(schedule, 9, [1, 8])
    assert few[0] == many[0]  # it has one layer in both
    assert many[1] - few[1] >= 6 * 3  # six borders more, in every forward but the last at least: a receive is open


def test_a_rank_polls_between_actions_that_no_message_parts() -> None:
    """F and B of a microbatch on the last rank, while the next activation is on its way."""
    assert polls("1f1b", 2, [1, 1])[1] == polls("naive", 2, [1, 1])[1] == 3  # at the last B there is no other one
    assert polls("gpipe", 2, [1, 1])[1] == 0  # at the first B all activations have come, and no gradient has gone


def test_a_rank_alone_does_not_poll() -> None:
    assert polls("1f1b", 4, [4]) == [0]
