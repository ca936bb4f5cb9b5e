"""Tables of a user's own: what layers do to their input, what ranks must have alike, which bits to expect."""

from __future__ import annotations

import logging
from pathlib import Path

import little
import pytest
import torch
from torch import nn

from mpipipe.errors import ConfigError
from mpipipe.schedule import ScheduleTable
from mpipipe.schedule.exchange import save_table
from mpipipe.trainer import Trainer
from mpipipe.transport import Transport, run_ranks, solo

M = 8


def norms(transport: Transport, layers: list[object], **keys: object) -> list[float]:
    config = little.config(batch__sequences=M, batch__microbatch=1, **keys)
    with Trainer(config, layers, little.square_loss, transport=transport) as trainer:
        return [trainer.step_report(little.batch(step, M)).grad_norm for step in range(3)]


def table_file(folder: Path, rows: list[str], **keys: object) -> str:
    path = folder / "own.csv"
    save_table(ScheduleTable.from_rows([row.split() for row in rows], **keys), path)
    return str(path)


@pytest.mark.parametrize("passing", [nn.Identity, nn.Flatten, lambda: View()])
def test_a_stage_that_passes_its_input_on_keeps_it_for_a_late_weight_gradient(tmp_path: Path, passing: object) -> None:
    """The next stage on the same rank makes its weight gradients after the buffer has gone back."""
    file = table_file(tmp_path, rows_of_four_stages(), v=2, placement=(0, 1, 1, 0), m=M)
    layers = [little.linear(), passing, little.linear(), little.linear()]
    keys = {"pipeline__schedule": file, "pipeline__chunks": 2}
    assert run_ranks(2, lambda transport: norms(transport, layers, **keys)) == [norms(solo(), layers)] * 2


def rows_of_four_stages() -> list[str]:
    first = [f"0F{k}" for k in range(M)]
    middle: list[str] = []
    for k in range(M):
        middle += [f"1F{k}", f"2F{k}"]
    for k in range(M):
        first += [f"3F{k}", f"3I{k}", f"3W{k}"]
        middle += [f"2I{k}", f"1I{k}", f"1W{k}"] + ([f"2W{k - 3}"] if k >= 3 else [])
    first += [f"0B{k}" for k in range(M)]
    middle += [f"2W{k}" for k in range(M - 3, M)]
    return [" ".join(first), " ".join(middle)]


class View(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape)


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(little.WIDTH, little.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.sub_(0.5)
        return self.linear(x)


@pytest.mark.parametrize("schedule, chunks, p", [("1f1b", 1, 2), ("zb-v", 2, 2), ("gpipe", 1, 3), ("zb-h1", 1, 3)])
def test_a_first_layer_may_change_its_input_and_the_batch_stays(schedule: str, chunks: int, p: int) -> None:
    layers = [ChangesItsInput, little.linear(), little.linear(), little.linear()]

    def work(transport: Transport, **keys: object) -> tuple[list[float], bool]:
        config = little.config(batch__sequences=M, batch__microbatch=2, **keys)
        x = torch.randn(M, little.WIDTH, generator=torch.Generator().manual_seed(2))
        before = x.clone()
        with Trainer(config, layers, little.square_loss, transport=transport) as trainer:
            losses = [trainer.step((x, x)) for _ in range(3)]
            losses.append(trainer.evaluate([(x, x)]))
        return losses, torch.equal(x, before)

    expected = work(solo())
    assert expected[1]
    keys = {"pipeline__schedule": schedule, "pipeline__chunks": chunks}
    assert run_ranks(p, lambda transport: work(transport, **keys)) == [expected] * p


def test_a_later_layer_that_changes_its_input_is_told_what_to_do() -> None:
    layers = [little.linear(), lambda: nn.ReLU(inplace=True)]
    with pytest.raises(RuntimeError) as caught:
        norms(solo(), layers)
    assert any("must not change its input" in note for note in caught.value.__notes__)
    norms(solo(), [lambda: nn.Sequential(little.linear()(), nn.ReLU(inplace=True))])


class Conjugate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x).conj()


class RealPart(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.real + 2 * x.imag


def test_conjugated_views_cross_ranks() -> None:
    layers = [little.linear(), Conjugate, RealPart, little.linear()]
    assert run_ranks(2, lambda transport: norms(transport, layers)) == [norms(solo(), layers)] * 2


def test_tables_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    forward = {"own": ["0F0 0B0", "1F0 1B0"], "other": ["1F0 1B0", "0F0 0B0"]}
    files = []
    for name, rows in forward.items():
        (tmp_path / name).mkdir()
        placement = (0, 1) if name == "own" else (1, 0)
        files.append(table_file(tmp_path / name, rows, placement=placement))

    def work(transport: Transport) -> None:
        keys = {"batch__sequences": 1, "batch__microbatch": 1, "pipeline__schedule": files[transport.rank]}
        with pytest.raises(ConfigError, match="rank 1 has another table than rank 0") as caught:
            Trainer(little.config(**keys), [little.linear(), little.linear()], little.square_loss, transport=transport)
        assert caught.value.seen_alike

    run_ranks(2, work)


def test_an_unordered_table_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = table_file(tmp_path, ["0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"])
    keys = {"batch__sequences": 2, "batch__microbatch": 1, "pipeline__schedule": file}

    def work(transport: Transport) -> None:
        layers = [little.linear(), little.linear()]
        with Trainer(little.config(**keys), layers, little.square_loss, transport=transport) as trainer:
            trainer.step(little.batch(0, 2))

    with caplog.at_level(logging.WARNING):
        run_ranks(2, work)
    assert sum("not in microbatch order" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_a_smaller_batch_under_a_schedule_that_needs_more(rows: int) -> None:
    """``dualpipe-v`` takes m >= 2p only; the last batch of an epoch is smaller."""

    def work(transport: Transport, schedule: str, chunks: int) -> list[float | None]:
        keys = {"pipeline__schedule": schedule, "pipeline__chunks": chunks}
        config = little.config(batch__sequences=M, batch__microbatch=1, **keys)
        layers = [little.linear() for k in range(4)]
        with Trainer(config, layers, little.square_loss, transport=transport) as trainer:
            return [trainer.step_report(little.batch(step, n)).loss for step, n in enumerate((M, rows, M))]

    expected = work(solo(), "1f1b", 1)
    assert run_ranks(2, lambda transport: work(transport, "dualpipe-v", 2)) == [expected] * 2
