"""The trainer on a device whose work is done late: tied weights, frozen layers, dropout, evaluation, checkpoints, with
the bits of one rank on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import little
import pytest
import tiny
import torch
from fakes.late_trainer import late_devices
from torch import nn

from mpipipe.analysis.load import load_segment
from mpipipe.analysis.summary import summary
from mpipipe.data import build_byte_tokens
from mpipipe.errors import EngineError
from mpipipe.formats.trace import FLAG_DEVICE_TIME, EventKind
from mpipipe.trainer import Trainer
from mpipipe.trainer.run import train_run
from mpipipe.transport import Transport, run_ranks

BATCHES = [little.batch(0), little.batch(1, 7), little.batch(2)]
TIED = [("1.weight", "7.weight")]


class Strided(nn.Module):
    """The same values in another order in memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.t().contiguous().t()


def layers() -> list[Callable[[], nn.Module]]:
    def frozen() -> nn.Module:
        return nn.Linear(little.WIDTH, little.WIDTH).requires_grad_(False)

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(little.WIDTH, little.WIDTH), nn.Dropout(0.3), nn.Tanh())

    return [frozen, little.linear(), block, Strided, little.View, block, block, little.linear()]


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(
    "schedule, p, chunks", [("1f1b", 1, 1), ("1f1b", 3, 1), ("interleaved", 2, 2), ("zb-h1", 4, 1)]
)
def test_training_on_a_late_device(schedule: str, p: int, chunks: int, staged: bool) -> None:
    given: dict[str, Any] = {"tied": TIED, "evaluate": lambda number: BATCHES[:number]}
    wanted = little.train_on(1, layers, little.config(), BATCHES, **given)
    with late_devices(staged) as drivers:
        found = little.train_on(p, layers, little.config(schedule=schedule, chunks=chunks), BATCHES, **given)
    assert len(drivers) == p
    little.assert_same(wanted, found)


@pytest.mark.parametrize("staged", [False, True])
def test_checkpoints_of_a_late_device(staged: bool, tmp_path: Path) -> None:
    """Saved on a late device at p = 2, restored on the host at p = 3, and the other way round."""

    def run(p: int, steps: range) -> list[tuple[float | None, float]]:
        def work(transport: Transport) -> list[tuple[float | None, float]]:
            config = little.config(run_dir=str(tmp_path))
            trainer = Trainer(config, layers(), little.square_loss, transport=transport, tied=TIED)
            assert trainer.restore() == steps.start
            reports = [trainer.step_report(little.batch(step)) for step in steps]
            trainer.save()
            trainer.close()
            return [(report.loss, report.grad_norm) for report in reports]

        return run_ranks(p, work)[0]

    def on_host() -> list[tuple[float | None, float]]:
        config = little.config()
        return little.train_on(1, layers, config, [little.batch(step) for step in range(6)], tied=TIED).steps

    wanted = on_host()
    with late_devices(staged):
        found = run(2, range(2))
    found += run(3, range(2, 4))
    with late_devices(staged):
        found += run(4, range(4, 6))
    assert found == wanted


def test_a_batch_stays_what_it_was() -> None:
    data = little.batch(0)
    before = [one.clone() for one in data]
    with late_devices(True):
        little.train_on(2, layers, little.config(), [data], tied=TIED)
    assert all(torch.equal(one, other) for one, other in zip(data, before, strict=True))


@pytest.mark.parametrize("staged", [False, True])
def test_a_traced_run_tells_the_device_the_path_and_the_copies(staged: bool, tmp_path: Path) -> None:
    config = little.config(run_dir=str(tmp_path), trace__enabled=True)
    with late_devices(staged):
        little.train_on(2, layers, config, BATCHES, tied=TIED)
    segment = load_segment(tmp_path)
    assert not segment.warnings  # a device's times come after those of the host, and no clock was set back
    for one in segment.ranks.values():
        assert one.trace.attributes["device"].startswith("late:")
        assert one.trace.attributes["message_path"] == ("staged" if staged else "cuda-aware")
        compute = one.events["kind"] <= EventKind.W
        assert (one.events["flags"][compute] & FLAG_DEVICE_TIME != 0).all()
    figures = summary(tmp_path)
    for rank in figures["per_rank"]:
        assert (rank["copy_s"] > 0) is staged
        assert rank["busy_s"] > 0
    assert all(0 <= step["bubble_fraction"] < 1 for step in figures["per_step"])


def test_a_run_file_s_run_repeats_its_bits_on_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 20)
    build_byte_tokens([tmp_path / "text.txt"], tmp_path / "train.h5")
    config = tiny.config(
        sequences=2, run_dir=str(tmp_path / "run"), run__steps=1, lr__warmup_steps=0, model__vocab=256,
        data__train=[str(tmp_path / "train.h5")],
    )  # fmt: skip
    with late_devices(True) as drivers:
        run_ranks(2, lambda transport: train_run(config, transport))
    assert [driver.repeats for driver in drivers] == [True, True]
    with late_devices(True) as drivers:
        little.train_on(1, layers, little.config(), BATCHES)
    assert [driver.repeats for driver in drivers] == [False]  # a script's own torch is left as it is


class Refills(nn.Module):
    """Returns a tensor of its own, the same for each microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(little.WIDTH, little.WIDTH)
        self.own = torch.empty(1, little.WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            self.own.copy_(x * 2)
        return self.linear(x), self.own


class Adds(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return pair[0] + pair[1]


def test_a_tensor_that_is_still_copied_out_is_not_refilled() -> None:
    """Else the next rank gets another microbatch's values, at times."""
    with pytest.raises(EngineError, match=r"return x\.clone\(\)"), late_devices(True):
        little.train_on(2, lambda: [Refills, Adds], little.config(schedule="gpipe"), [little.batch(0)])


class Skips(nn.Module):
    """Decides by a draw on the host whether it does anything."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.rand(()) < 0.5 else x


@pytest.mark.parametrize("p", [1, 3])
def test_draws_on_the_host_are_seeded_too(p: int) -> None:
    def skipping() -> list[Callable[[], nn.Module]]:
        return [little.linear(), Skips, little.linear(), Skips, little.linear()]

    wanted = little.train_on(1, skipping, little.config(), BATCHES)
    before = torch.get_rng_state()
    with late_devices(True):
        found = little.train_on(p, skipping, little.config(), BATCHES)
    little.assert_same(wanted, found)
    assert torch.equal(torch.get_rng_state(), before)
