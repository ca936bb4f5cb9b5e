"""The engine over loopback: what it keeps, what it tells when something fails, and odd layers on every cut."""

from __future__ import annotations

from collections.abc import Callable

import little
import pytest
import torch
from torch import nn

from mpipipe.device import HostDevice
from mpipipe.engine import Engine, RunResult, compile_program
from mpipipe.errors import EngineError, ScheduleError, TransportError
from mpipipe.schedule import ScheduleTable, build, forward_only, names, simulate
from mpipipe.stage import Stage, StageLayer
from mpipipe.topology import stages_on
from mpipipe.trace import Recorder
from mpipipe.trainer import Trainer
from mpipipe.trainer.feed import TensorFeed
from mpipipe.transport import Transport, run_ranks, solo

FAMILIES = [(name, v) for name in names() for v in (1, 2, 3)]


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
    try:
        table = build(name, p=p, v=v, m=m)
    except ScheduleError:
        return  # the family does not take these
    if table.mirror is not None:
        return
    results = run_table(table)
    assert [result.peak_live for result in results] == simulate(table).peak_activations.tolist()
    owner = table.placement[-1]
    assert [result.count for result in results] == [m if rank == owner else 0 for rank in range(p)]
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
    class Words(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[str, None]:
            return "no", None

    class Bag(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, set[int]]:
            return x, {1}

    words = {Words: "returned a tuple without any tensor", Bag: "returned a set; "}
    for module, text in words.items():
        layers = [little.linear(), module, little.linear()]
        with pytest.raises(EngineError, match=rf"layer 1 \({module.__name__}\) {text}"):
            little.train_on(2, layers.copy, little.config(), [little.batch(0)])


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
        assert trainer.model.stages[0].live == 0
        return outcome

    bad = little.batch(2)
    bad[1][2, 0] = 99.0
    first, second = little.batch(0), little.batch(1)
    little.assert_same(run([first, bad, second]), run([first, second]))
    little.assert_same(run([bad, first]), run([first]))
    little.assert_same(run([bad, little.batch(3, 1)]), run([little.batch(3, 1)]))


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
    batches = [little.batch(step, 4, 4, little.WIDTH) for step in range(3)]

    def run(p: int, **keys: object) -> little.Outcome:
        return little.train_on(p, ODD[name], little.config(**keys), batches, evaluate=lambda _: batches[:2])

    expected = run(1)
    little.assert_same(run(p, schedule=schedule, chunks=chunks), expected)
    assert len({loss for loss, _ in expected.steps}) > 1


@pytest.mark.parametrize(
    "p, schedule, chunks, sizes",
    [(2, "1f1b", 1, [2, 4]), (3, "gpipe", 1, [2, 2, 2]), (2, "interleaved", 2, [2, 1, 1, 2])],
)
def test_integers_go_in_and_stay_within_the_first_stage(p: int, schedule: str, chunks: int, sizes: list[int]) -> None:
    def layers() -> list[object]:
        return [nn.Identity, lambda: nn.Embedding(9, 6), little.linear(), nn.Identity, nn.ReLU, little.linear()]

    batches = [(torch.arange(k, k + 12).view(4, 3) % 9, little.batch(k, 4, 3, 6)[1]) for k in range(3)]

    def run(p: int, **keys: object) -> little.Outcome:
        return little.train_on(p, layers, little.config(**keys), batches, evaluate=lambda _: batches)

    little.assert_same(run(p, schedule=schedule, chunks=chunks, pipeline__partition=sizes), run(1))


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
    """Whatever the order in which they come: 1 + 1e16 - 1e16 is 0 in float64, 1e16 - 1e16 + 1 is 1."""
    target = torch.tensor([[1.0], [1.0], [-1.0]])
    inputs = torch.tensor([[1.0], [1e8], [1e8]])

    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        return output.double().square().sum() * target.sum(), 1

    device = HostDevice()
    stage = Stage(0, [StageLayer(nn.Identity(), 0, "0")], device, loss)
    engine = Engine(solo(), device, Recorder(None), {0: stage}, 1)
    for order in ("012", "120", "210"):
        row = [f"0F{k}" for k in order] + [f"0B{k}" for k in order]
        program = compile_program(ScheduleTable.from_rows([row]), 0)
        assert engine.run(program, TensorFeed((inputs, target), 1, device)).loss_sum == 0.0


def there_and_back(m: int) -> ScheduleTable:
    """Stages 1 and 2 follow each other on rank 1, stages 0 and 3 lie on rank 0."""

    def row(*steps: str) -> list[str]:
        return [f"{step}{k}" for step in steps for k in range(m)]

    return ScheduleTable.from_rows(
        [row("0F", "3F", "3B", "0B"), row("1F", "2F", "2B", "1B")], placement=(0, 1, 1, 0), v=2, m=m
    )


@pytest.mark.parametrize("table", [there_and_back(9), build("gpipe", p=4, m=9), build("gpipe", p=2, v=2, m=9)])
def test_a_buffer_stays_as_long_as_anything_looks_into_it(table: ScheduleTable) -> None:
    """Stages without a copy of their own, more microbatches than receives are open, and a neighbour on one rank."""
    inputs, target = little.batch(0, table.m)

    def module(stage: int) -> nn.Module:
        torch.manual_seed(stage)
        return nn.Linear(little.WIDTH, little.WIDTH) if stage == 0 else little.View()

    def work(transport: Transport) -> tuple[list[float], list[float]]:
        engine = engine_for(table, transport, module)
        sums, gradients = [], []
        programs = [table, forward_only(table.placement, table.p, table.v, table.m)] * 2
        for program in programs:
            feed = TensorFeed((inputs, target), 1, HostDevice(), draw_seed=1)
            sums.append(engine.run(compile_program(program, transport.rank), feed).loss_sum)
        for stage in engine._stages.values():
            for layer in stage.layers:
                gradients += [gradient.finish().sum().item() for gradient in layer.gradients]
            assert stage.live == 0
        return sums, gradients

    ranks = run_ranks(table.p, work)
    first = module(0)
    rows = [little.square_loss(first(inputs[k : k + 1]), target[k : k + 1])[0] for k in range(table.m)]
    assert ranks[table.placement[-1]][0] == [pytest.approx(sum(row.item() for row in rows), rel=1e-12)] * 4
    for row in [*rows, *rows]:
        row.backward(retain_graph=True)
    found = ranks[table.placement[0]][1]
    assert found == pytest.approx([parameter.grad.sum().item() for parameter in first.parameters()], rel=1e-5)


def test_no_run_begins_between_ranks_after_one_that_failed() -> None:
    """Its messages may still be on their way: taken for those of the next step, they would train on wrong values."""

    def work(transport: Transport) -> str:
        layers = [little.linear(), lambda: Failing(1)]
        trainer = Trainer(little.config(), layers, little.square_loss, transport=transport)
        with pytest.raises((ArithmeticError, TransportError)):
            trainer.step(little.batch(0))
        with pytest.raises(EngineError) as caught:
            trainer.step(little.batch(1))
        return str(caught.value)

    told = run_ranks(2, work)
    assert all(text.startswith("step 1 can't begin: step 1 did not end, and messages") for text in told)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "eager-1f1b", "zb-h1"])
def test_a_buffer_is_not_used_again_while_what_a_stage_made_lies_in_it(schedule: str) -> None:
    """Outputs and gradients that are the received ones: sent on out of the buffers that they came in."""
    views = [lambda: nn.Flatten(0), lambda: nn.Unflatten(0, (1, little.WIDTH))]
    layers = [little.linear(), *views, *views, little.linear()]

    def work(transport: Transport, **keys: object) -> list[tuple[float | None, float]]:
        config = little.config(sequences=16, microbatch=1, **keys)
        trainer = Trainer(config, layers, little.square_loss, transport=transport)
        reports = [trainer.step_report(little.batch(step, 16)) for step in range(3)]
        return [(report.loss, report.grad_norm) for report in reports]

    assert run_ranks(6, lambda transport: work(transport, schedule=schedule)) == [work(solo())] * 6
