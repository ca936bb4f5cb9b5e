"""What a trainer keeps, restores, and leaves alone."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import little
import pytest
import tiny
import torch
from torch import nn

from mpipipe.errors import CheckpointError, ConfigError
from mpipipe.trainer import Trainer
from mpipipe.transport import Transport, run_ranks, solo
from mpipipe.transport.loopback import LoopbackTransport, LoopbackWorld


@pytest.mark.parametrize("p", [1, 2, 3])
def test_evaluating_in_between_changes_no_bit(p: int) -> None:
    """E T E E T equals T T, and an evaluation repeats its own bits."""

    def work(transport: Transport) -> tuple[tiny.Story, list[float]]:
        settings = tiny.config()
        made = tiny.trainer(settings, transport)
        story, seen = tiny.Story(), []
        held_out = [tiny.batch(50), tiny.batch(51, 3, 5), tiny.batch(52, 1)]
        for action in "ETEETE":
            if action == "E":
                seen.append(made.evaluate(held_out))
            else:
                report = made.step_report(tiny.batch(made.step_index))
                story.steps.append((report.loss, report.grad_norm))
        story.state = tiny.digests(made)
        return story, seen

    found = run_ranks(p, work)
    expected = tiny.run(tiny.config(), solo(), steps=2)
    story = tiny.merge([story for story, _ in found])
    assert (story.steps, story.state) == (expected.steps, expected.state)
    seen = found[0][1]
    assert all(other == seen for _, other in found)
    assert seen == run_ranks(1, work)[0][1]
    assert seen[1] == seen[2]
    assert len(set(seen)) == 3


class Modes(nn.Module):
    """One part that the user has put into evaluation mode for good."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(little.WIDTH, little.WIDTH)
        self.still = nn.Dropout(0.5)
        self.still.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.still(self.weight(x))


def test_an_evaluation_puts_every_module_s_mode_back() -> None:
    trainer = Trainer(little.config(), [Modes, little.linear()], little.square_loss, transport=solo())
    modules = [module for layer in trainer.model.modules for module in layer.modules()]
    before = [module.training for module in modules]
    assert before.count(False) == 1
    trainer.evaluate([little.batch(0)])
    assert [module.training for module in modules] == before

    def wrong() -> object:
        yield little.batch(0)
        raise KeyError("the loader")

    with pytest.raises(KeyError):
        trainer.evaluate(wrong())  # type: ignore[arg-type]
    assert [module.training for module in modules] == before


def test_an_evaluation_is_weighted_by_items_and_not_by_batches() -> None:
    trainer = Trainer(little.config(), [little.linear()], little.square_loss, transport=solo())
    sizes = (1, 7, 4)
    batches = [little.batch(k, size) for k, size in enumerate(sizes)]
    apart = [trainer.evaluate([data]) for data in batches]
    mean = sum(loss * size for loss, size in zip(apart, sizes, strict=True)) / sum(sizes)
    assert trainer.evaluate(batches) == pytest.approx(mean, rel=1e-6)
    assert trainer.evaluate([]) != trainer.evaluate([])  # nan


@pytest.mark.parametrize(
    "p, schedule, chunks", [(1, "1f1b", 1), (3, "1f1b", 1), (2, "interleaved", 2), (2, "gpipe", 1)]
)
def test_memory_is_flat_over_fifty_steps(p: int, schedule: str, chunks: int) -> None:
    """B17: buffers stop growing after two steps, and Python's own memory too."""

    def work(transport: Transport) -> tuple[list[tuple[int, int]], list[int]]:
        config = little.config(schedule=schedule, chunks=chunks, sequences=8)
        layers = [little.linear() for _ in range(p * chunks)]
        trainer = Trainer(config, layers, little.square_loss, transport=transport)
        pool, sizes, traced = trainer._engine.mail.pool, [], []
        for step in range(50):
            trainer.step(little.batch(step % 3, 8))
            sizes.append((pool.allocated_buffers, pool.allocated_bytes))
            if transport.rank == 0 and step in (19, 49):
                gc.collect()
                traced.append(tracemalloc.get_traced_memory()[0])
        return sizes, traced

    tracemalloc.start()
    try:
        found = run_ranks(p, work)
    finally:
        tracemalloc.stop()
    for sizes, _ in found:
        assert len(set(sizes[2:])) == 1
    first, last = found[0][1]
    assert last - first < 10_000 * p  # one object of 50 bytes a microbatch would make 12,000 a rank


def test_what_is_kept_of_one_microbatch_is_let_go() -> None:
    alive: list[object] = []

    class Watches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(little.WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            import weakref

            y = x * self.weight
            alive.append(weakref.ref(y))
            return y

    trainer = Trainer(little.config(), [Watches, Watches], little.square_loss, transport=solo())
    for step in range(2):
        trainer.step(little.batch(step))
    gc.collect()
    assert len(alive) == 16
    assert not [ref for ref in alive if ref() is not None]  # type: ignore[operator]


class Counts(nn.Module):
    """Buffers of several types, one of them no part of the state, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(little.WIDTH)
        self.frozen = nn.Parameter(torch.full((3,), 7.0), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.register_buffer("bits", torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
        self.register_buffer("turn", torch.tensor([1 + 2j, 3 - 1j]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.total += float(x.detach().sum())
            self.mask.logical_not_()
            self.bits *= 1.5
            self.turn *= 1j
        return self.norm(x)


@pytest.mark.parametrize("before, after", [(1, 3), (3, 1), (2, 3)])
def test_buffers_travel_with_a_checkpoint_into_any_ranks(before: int, after: int, tmp_path: Path) -> None:
    def layers() -> list[object]:
        return [little.linear(), Counts, little.linear()]

    batches = [little.batch(step, 6) for step in range(5)]
    config = little.config(sequences=6, microbatch=3, run_dir=str(tmp_path))
    whole = little.train_on(1, layers, config, batches)

    def begin(transport: Transport) -> None:
        with Trainer(config, layers(), little.square_loss, transport=transport) as trainer:
            for data in batches[:2]:
                trainer.step(data)
            trainer.save()

    def go_on(transport: Transport) -> little.Outcome:
        with Trainer(config, layers(), little.square_loss, transport=transport) as trainer:
            assert trainer.restore() == 2
            assert trainer.samples_seen == 12
            steps = [trainer.step_report(data) for data in batches[2:]]
            return little.Outcome([(r.loss, r.grad_norm) for r in steps], parts=little.parts_of(trainer))

    run_ranks(before, begin)
    found = little.merged(run_ranks(after, go_on))
    found.steps = [*whole.steps[:2], *found.steps]
    little.assert_same(found, whole)
    assert whole.parts["1.norm.num_batches_tracked"].item() == 10


def test_restoring_from_nothing_begins_at_zero(tmp_path: Path) -> None:
    config = little.config(run_dir=str(tmp_path / "none"))
    trainer = Trainer(config, [little.linear()], little.square_loss, transport=solo())
    assert trainer.restore() == 0
    assert trainer.save_if_due() is None
    assert not (tmp_path / "none").exists()


def test_saving_when_due(tmp_path: Path) -> None:
    config = little.config(run_dir=str(tmp_path), checkpoint__every_steps=2, checkpoint__keep_last=1)

    def work(transport: Transport) -> list[str | None]:
        trainer = Trainer(config, [little.linear(), little.linear()], little.square_loss, transport=transport)
        saved = []
        for step in range(5):
            trainer.step(little.batch(step))
            folder = trainer.save_if_due()
            saved.append(folder.name if folder else None)
        return saved

    for saved in run_ranks(2, work):
        assert saved == [None, "step-00000002", None, "step-00000004", None]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]


def test_another_seed_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    def begin(transport: Transport) -> None:
        config = little.config(run_dir=str(tmp_path))
        with Trainer(config, [little.linear(), little.linear()], little.square_loss, transport=transport) as trainer:
            trainer.step(little.batch(0))
            trainer.save()

    def other(transport: Transport) -> None:
        config = little.config(run_dir=str(tmp_path), run__seed=6)
        trainer = Trainer(config, [little.linear(), little.linear()], little.square_loss, transport=transport)
        before = little.parts_of(trainer)
        with pytest.raises(ConfigError, match=r"run\.seed"):
            trainer.restore()
        assert all(torch.equal(value, before[name]) for name, value in little.parts_of(trainer).items())
        assert trainer.step_index == 0

    run_ranks(2, begin)
    run_ranks(2, other)


def test_another_model_is_refused_alike(tmp_path: Path) -> None:
    def begin(transport: Transport) -> None:
        config = little.config(run_dir=str(tmp_path))
        with Trainer(config, [little.linear(), little.linear()], little.square_loss, transport=transport) as trainer:
            trainer.save()

    def other(transport: Transport) -> str:
        config = little.config(run_dir=str(tmp_path))
        wide = [little.linear(), lambda: nn.Linear(little.WIDTH, 4)]
        trainer = Trainer(config, wide, little.square_loss, transport=transport)
        with pytest.raises(CheckpointError, match=r"1\.weight is \(6, 6\) in the checkpoint and \(4, 6\)") as caught:
            trainer.restore()
        return str(caught.value)

    run_ranks(2, begin)
    assert len(set(run_ranks(2, other))) == 1


class Frozen(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(little.WIDTH, little.WIDTH)
        self.register_buffer("kept", torch.full((2,), 1.5, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_a_tensor_of_another_type_is_refused_alike(tmp_path: Path) -> None:
    """The bits of a bfloat16 1.5 read as a whole number are 16320."""
    config = little.config(run_dir=str(tmp_path))

    def open_trainer(dtype: torch.dtype, transport: Transport) -> Trainer:
        layers = [little.linear(), lambda: Frozen(dtype)]
        return Trainer(config, layers, little.square_loss, transport=transport)

    def other(transport: Transport) -> str:
        trainer = open_trainer(torch.float32, transport)
        with pytest.raises(CheckpointError, match=r"1\.kept is bfloat16 in the checkpoint and float32") as caught:
            trainer.restore()
        return str(caught.value)

    run_ranks(2, lambda transport: open_trainer(torch.bfloat16, transport).save())
    assert len(set(run_ranks(2, other))) == 1
    assert run_ranks(2, lambda transport: open_trainer(torch.bfloat16, transport).restore()) == [0, 0]


class Patience(LoopbackTransport):
    """Notes the time limit of its waits."""

    timeout_s = 0.0

    def configure(self, *, timeout_s: float, wait: str) -> None:
        self.timeout_s = timeout_s


@pytest.mark.parametrize("what", ["save", "prune", "restore"])
def test_ranks_wait_longer_for_files_than_for_messages(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = Patience(LoopbackWorld(1), 0)
    config = little.config(run_dir=str(tmp_path), comm__timeout_s=7.0, checkpoint__keep_last=1)
    trainer = Trainer(config, [little.linear()], little.square_loss, transport=transport)
    seen = []

    def fail(*given: object, **named: object) -> None:
        seen.append(transport.timeout_s)
        raise KeyError("a fault")

    monkeypatch.setattr(f"mpipipe.checkpoint.{what}", fail)
    with pytest.raises(KeyError):
        trainer.restore() if what == "restore" else trainer.save()
    assert (seen, transport.timeout_s) == ([3600.0], 7.0)


def test_a_step_may_have_fewer_or_more_sequences_than_the_run_file_says() -> None:
    """m follows the batch."""
    batches = [little.batch(0, rows) for rows in (4, 1, 9, 4)]

    def layers() -> list[object]:
        return [little.linear() for _ in range(3)]

    expected = little.train_on(1, layers, little.config(microbatch=2), batches)
    for p in (2, 3):
        little.assert_same(little.train_on(p, layers, little.config(microbatch=2), batches), expected)
