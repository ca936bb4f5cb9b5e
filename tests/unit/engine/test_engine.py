"""The engine over loopback: what it keeps, what it tells when something fails, and odd layers on every cut."""

from __future__ import annotations

from collections.abc import Callable

import little
import numpy as np
import pytest
import torch
from torch import nn

from mpipipe.device import HostDevice
from mpipipe.engine import Engine, RunResult, compile_program
from mpipipe.errors import EngineError
from mpipipe.schedule import ScheduleTable, build, forward_only, simulate
from mpipipe.stage import Stage, StageLayer
from mpipipe.topology import stages_on
from mpipipe.trace import Recorder
from mpipipe.trainer import Trainer
from mpipipe.trainer.feed import TensorFeed
from mpipipe.transport import Transport, run_ranks, solo

FAMILIES = [("naive", 1), ("naive", 2), ("gpipe", 1), ("gpipe", 2), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]


def engine_for(table: ScheduleTable, transport: Transport, module: Callable[[int], nn.Module]) -> Engine:
    """An engine with one layer a stage."""
    device = HostDevice()
    last = table.num_stages - 1
    stages = {
        stage: Stage(
            stage, [StageLayer(module(stage), stage, str(stage))], device, little.square_loss if stage == last else None
        )
        for stage in stages_on(table.placement, transport.rank)
    }
    return Engine(transport, device, Recorder(None), stages, table.num_stages)


def run_table(table: ScheduleTable, module: Callable[[int], nn.Module] | None = None) -> list[RunResult]:
    def work(transport: Transport) -> RunResult:
        engine = engine_for(table, transport, module or (lambda stage: nn.Linear(little.WIDTH, little.WIDTH)))
        feed = TensorFeed(little.batch(0, table.m), 1, HostDevice(), draw_seed=1)
        return engine.run(compile_program(table, transport.rank), feed)

    return run_ranks(table.p, work)


@pytest.mark.parametrize("m", [1, 3, 4, 8])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("name, v", FAMILIES)
def test_activations_kept_are_those_of_the_simulation(name: str, v: int, p: int, m: int) -> None:
    table = build(name, p=p, v=v, m=m)
    results = run_table(table)
    assert [result.peak_live for result in results] == simulate(table).peak_activations.tolist()
    assert [result.count for result in results[:-1]] == [0] * (p - 1)
    assert results[-1].count == m
    assert all(result.start_ns < result.end_ns for result in results)


def test_peaks_follow_the_schedule_and_not_the_number_of_microbatches() -> None:
    assert [result.peak_live for result in run_table(build("1f1b", p=3, m=40))] == [3, 2, 1]
    assert [result.peak_live for result in run_table(build("gpipe", p=3, m=40))] == [40, 40, 40]
    evaluated = run_table(forward_only((0, 1, 0, 1), 2, 2, 5))
    assert [result.peak_live for result in evaluated] == [0, 0]


class Failing(nn.Module):
    """Raises when it meets a microbatch for the given time."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(little.WIDTH))
        self.left = at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise ArithmeticError("too hot")
        return x * self.weight


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("too cold")


class BadBackward(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FailingBackward.apply(x)


def first_failure(p: int, broken: int, module: Callable[[], nn.Module], loss: object = little.square_loss) -> Exception:
    layers = [little.linear() for _ in range(p)]
    layers[broken] = module

    def work(transport: Transport) -> None:
        trainer = Trainer(little.config(), layers, loss, names=[f"part{k}" for k in range(p)], transport=transport)
        trainer.step(little.batch(0))

    with pytest.raises(ArithmeticError) as caught:
        run_ranks(p, work)
    return caught.value


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_failing_forward_tells_rank_operation_and_layer(rank: int) -> None:
    error = first_failure(3, rank, lambda: Failing(1))
    notes = "\n".join(error.__notes__)
    assert str(error) == "too hot"
    assert f"in layer {rank} (part{rank}), stage {rank}, microbatch 1" in notes
    assert f"rank {rank} at {rank}F1; before it:" in notes
    assert f"{rank}F0" in notes.split("before it:")[1]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_failing_backward_tells_rank_operation_and_layer(rank: int) -> None:
    if rank == 0:  # the first layer's input takes no gradient: one with a weight before it
        error = first_failure(3, 0, lambda: nn.Sequential(nn.Linear(little.WIDTH, little.WIDTH), BadBackward()))
    else:
        error = first_failure(3, rank, BadBackward)
    notes = "\n".join(error.__notes__)
    assert f"in the backward of layer {rank} (part{rank}), microbatch 0" in notes
    assert f"rank {rank} at {rank}B0" in notes


def test_a_failing_loss_tells_rank_and_microbatch() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        raise ArithmeticError("no loss")

    notes = "\n".join(first_failure(2, 0, little.linear(), loss).__notes__)
    assert "in the loss function, microbatch 0" in notes
    assert "rank 1 at 1F0" in notes


def test_a_layer_that_returns_no_tensor_is_named() -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x

    with pytest.raises(EngineError, match=r"layer 1 \(1\) returned tuple; .*one tensor"):
        little.train_on(2, lambda: [little.linear(), Pair, little.linear()], little.config(), [little.batch(0)])


def test_a_step_that_failed_leaves_nothing_behind() -> None:
    """One rank, and a script that goes on after a bad batch: as if that batch had never been."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        if float(target[0, 0]) == 99.0:
            raise ArithmeticError("a bad row")
        return little.square_loss(output, target)

    def run(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> little.Outcome:
        trainer = Trainer(little.config(), [little.linear(), little.linear()], loss, transport=solo())
        outcome = little.Outcome()
        for data in batches:
            try:
                report = trainer.step_report(data)
                outcome.steps.append((report.loss, report.grad_norm))
            except ArithmeticError:
                assert data is bad
        outcome.parts = little.parts_of(trainer)
        return outcome

    bad = little.batch(2)
    bad[1][2, 0] = 99.0
    first, second = little.batch(0), little.batch(1)
    little.assert_same(run([first, bad, second]), run([first, second]))
    little.assert_same(run([bad, first]), run([first]))


ODD: dict[str, Callable[[], list[object]]] = {
    "identity at every place": lambda: [
        nn.Identity,
        little.linear(),
        nn.Identity,
        nn.Identity,
        little.linear(),
        nn.Identity,
    ],
    "identity on both sides of each cut": lambda: [
        little.linear(),
        nn.Identity,
        nn.Identity,
        nn.Identity,
        nn.Identity,
        little.linear(),
    ],
    "views": lambda: [little.View, little.linear(), little.View, little.View, little.linear(), little.View],
    "strided views": lambda: [
        little.Turned,
        little.Turned,
        little.linear(),
        little.Turned,
        little.linear(4),
        little.Turned,
    ],
    "integers first": lambda: [
        nn.Identity,
        lambda: nn.Embedding(9, 6),
        little.linear(),
        nn.Identity,
        nn.ReLU,
        little.linear(),
    ],
}


@pytest.mark.parametrize(
    "p, schedule, chunks",
    [
        (2, "1f1b", 1),
        (3, "1f1b", 1),
        (1, "interleaved", 2),
        (2, "gpipe", 2),
        (2, "interleaved", 3),
        (3, "interleaved", 2),
    ],
)
@pytest.mark.parametrize("name", ODD)
def test_odd_layers_give_the_bits_of_one_rank(name: str, p: int, schedule: str, chunks: int) -> None:
    def batches() -> list[object]:
        if name == "integers first":
            numbers = torch.arange(5 * 3 * 4).view(5, 3, 4) % 9
            # an integer layer output stays within its stage: the first cut lies behind the embedding
            return [(row.flatten()[:4].view(4, 1), torch.ones(4, 1, 6)) for row in numbers]
        return [little.batch(step, 4, 4, little.WIDTH) for step in range(3)]

    keys = {"sequences": 4}
    if name == "integers first":
        if p * chunks > 5:
            pytest.skip("integers do not go between stages")
        sizes = {2: [2, 4], 3: [2, 2, 2], 4: [2, 1, 1, 2]}[p * chunks]
        keys["pipeline__partition"] = sizes
    config = little.config(schedule=schedule, chunks=chunks, **keys)
    evaluate = lambda number: batches()[:2]  # noqa: E731
    expected = little.train_on(1, ODD[name], little.config(), batches(), evaluate=evaluate)
    found = little.train_on(p, ODD[name], config, batches(), evaluate=evaluate)
    little.assert_same(found, expected)
    assert len({loss for loss, _ in expected.steps}) > 1


@pytest.mark.parametrize("p, schedule, chunks", [(2, "1f1b", 1), (3, "gpipe", 1), (2, "interleaved", 2)])
def test_sequence_and_batch_may_change_from_step_to_step(p: int, schedule: str, chunks: int) -> None:
    """B12: growing and shrinking, whole and in the last microbatch, in training and in evaluation."""
    shapes = [(8, 16), (8, 9), (5, 9), (1, 31), (8, 16), (3, 2), (7, 16)]
    batches = [little.batch(k, rows, length, little.WIDTH) for k, (rows, length) in enumerate(shapes)]

    def evaluate(number: int) -> list[object]:
        rows, length = shapes[-1 - number]
        return [little.batch(40 + number, rows + 2, length + 1, little.WIDTH), little.batch(3, 2, 5, little.WIDTH)]

    def layers() -> list[object]:
        return [little.linear(), lambda: nn.LayerNorm(little.WIDTH), nn.GELU, little.linear()]

    def run(p: int, **keys: object) -> little.Outcome:
        config = little.config(sequences=8, microbatch=3, **keys)
        return little.train_on(p, layers, config, batches, evaluate=evaluate)

    little.assert_same(run(p, schedule=schedule, chunks=chunks), run(1))


def test_losses_are_summed_in_microbatch_order() -> None:
    """Whatever the order in which they come: 1e16 + 1 - 1e16 depends on it."""
    target = torch.zeros(3, 1)
    inputs = torch.tensor([[1e8], [1.0], [1e8]])

    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        sign = -1.0 if float(target) else 1.0
        return output.double().square().sum() * sign, 1

    target[2] = 1.0

    def work(transport: Transport) -> float:
        table = build("gpipe", p=transport.size, v=1, m=3)
        device = HostDevice()
        stage = Stage(0, [StageLayer(nn.Identity(), 0, "0")], device, loss)
        engine = Engine(transport, device, Recorder(None), {0: stage}, 1)
        return engine.run(compile_program(table, 0), TensorFeed((inputs, target), 1, device)).loss_sum

    assert run_ranks(1, work) == [float(np.float64(1e16) + np.float64(1.0) - np.float64(1e16))]
