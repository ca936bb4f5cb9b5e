"""What a stage handed on, and a layer changes afterwards: told, however many of its tensors it fills in turn."""

from __future__ import annotations

import time

import little
import pytest
import torch
from torch import nn

from mpipipe.device import HostDevice
from mpipipe.errors import EngineError
from mpipipe.stage import Activation, MicrobatchKey, Stage, StageLayer
from mpipipe.stage.handed import HandedOn

W = little.WIDTH


class Ring(nn.Module):
    """Copies its input into one of its tensors, in turn, and returns that too."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)
        self.ring = [torch.zeros(2, W) for _ in range(length)]
        self.calls = 0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        place = self.ring[self.calls % len(self.ring)]
        self.calls += 1
        with torch.no_grad():
            place.copy_(x)
        return self.linear(x), place


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.linear(value[0]) + value[1]


def outputs(length: int, microbatches: int, held: int) -> list[Activation]:
    """The newest ``held`` outputs of a stage stay alive."""
    stage = Stage(0, [StageLayer(Ring(length), 0, "0")], HostDevice(), None)
    alive: list[Activation] = []
    for k in range(microbatches):
        alive.append(stage.forward(torch.full((2, W), float(k)), MicrobatchKey(k, None)))
        del alive[:-held]
    return alive


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_tensor_that_is_filled_again_while_it_is_held_is_told(length: int) -> None:
    with pytest.raises(EngineError, match=r"a layer of stage 0 \(layer 0 .* had returned for an earlier microbatch"):
        outputs(length, length + 1, held=length + 1)
    last = outputs(length, length, held=length)
    assert [float(one.tensors[1][0, 0]) for one in last] == [float(k) for k in range(length)]


@pytest.mark.parametrize("length", [2, 3])
def test_a_tensor_that_nobody_holds_may_be_filled_again(length: int) -> None:
    assert len(outputs(length, 4 * length, held=length - 1)) == length - 1


def test_a_ring_of_two_is_told_in_a_run_and_right_where_nothing_is_waiting() -> None:
    data = [little.batch(step, 12) for step in range(2)]
    config = little.config(schedule="gpipe", sequences=12, microbatch=2)

    def layers() -> list[object]:
        return [lambda: Ring(2), Sum]

    with pytest.raises(EngineError, match=r"return x\.clone"):
        little.train_on(2, layers, config, data)

    def copied() -> list[object]:
        class Copied(Ring):
            def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                made, place = super().forward(x)
                return made, place.clone()

        return [lambda: Copied(2), Sum]

    alone = little.train_on(1, copied, config, data)
    little.assert_same(alone, little.train_on(2, copied, config, data))


def test_a_new_run_knows_nothing_of_the_one_before() -> None:
    stage = Stage(0, [StageLayer(Ring(2), 0, "0")], HostDevice(), None)
    held = [stage.forward(torch.zeros(2, W), MicrobatchKey(k, None)) for k in range(2)]
    stage.drop_kept()
    held += [stage.forward(torch.zeros(2, W), MicrobatchKey(k, None)) for k in range(2)]
    assert len(held) == 4


def test_the_work_does_not_grow_with_what_is_held() -> None:
    """The least time of 100 calls, after 100 and after 20,000 that are all held."""
    handed, held = HandedOn(), []

    def took_ns() -> int:
        tensors = [[torch.zeros(1)] for _ in range(100)]
        held.extend(tensors)
        start = time.perf_counter_ns()
        for one in tensors:
            assert handed.add(one)
        return time.perf_counter_ns() - start

    few = min(took_ns() for _ in range(10))
    for _ in range(200):
        took_ns()
    assert min(took_ns() for _ in range(10)) < 5 * few


def test_an_empty_tensor_lies_nowhere() -> None:
    handed = HandedOn()
    held = [torch.zeros(0, 3) for _ in range(3)]
    assert all(handed.add([one]) for one in held)
