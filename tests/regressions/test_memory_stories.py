"""What a pipeline keeps, and for how long; and where its loss is told (reported as a loss of -1 and growing memory)."""

from __future__ import annotations

import gc
import io
import json
import os
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import little
import numpy as np
import pytest
import tiny
import torch
from torch import nn

from mpipipe.cli.progress import step_progress
from mpipipe.device import ALIGNMENT
from mpipipe.formats.paths import RunPaths
from mpipipe.formats.tokens import write_tokens
from mpipipe.trainer import Trainer, train_run
from mpipipe.transport import Transport, run_ranks

pytestmark = pytest.mark.slow

STEPS = 300
WARM = 20
ROWS, WIDTH = 128, 256
ACTIVATION_BYTES = 4 * ROWS * WIDTH
LEAK_BYTES = (STEPS - WARM) * ACTIVATION_BYTES
"""What one activation a step would add: 37 MB."""


class Watched(nn.Module):
    """Counts how many of its outputs are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(little.WIDTH, little.WIDTH)
        self.outputs: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.inner(x)
        self.outputs = [ref for ref in self.outputs if ref() is not None]
        self.outputs.append(weakref.ref(output))
        self.most = max(self.most, len(self.outputs))
        return output


def most_alive(p: int, schedule: str, m: int) -> list[int]:
    """Most outputs of each rank's layer that were alive at once, in two steps of m microbatches."""

    def work(transport: Transport) -> int:
        config = little.config(schedule=schedule, sequences=m)
        trainer = Trainer(config, [Watched] * p, little.square_loss, transport=transport)
        for step in range(2):
            trainer.step(little.batch(step, m))
        (layer,) = trainer.model.modules
        return layer.most  # type: ignore[return-value]

    return run_ranks(p, work)


@pytest.mark.parametrize("p", [2, 4])
def test_activations_are_not_kept_for_every_microbatch(p: int) -> None:
    """As reported: outputs of all microbatches stayed referenced, so that memory rose with m under 1f1b too. The
    tensors themselves are counted, at 4 and at 64 microbatches.
    """
    assert most_alive(p, "1f1b", 4) == most_alive(p, "1f1b", 64) == [p - rank for rank in range(p)]
    # Of the last rank's the loss keeps what its own backward needs, here not the output itself.
    assert most_alive(p, "gpipe", 4)[:-1] == [4] * (p - 1)
    assert most_alive(p, "gpipe", 64)[:-1] == [64] * (p - 1)


class Scaled(nn.Module):
    """Large activations at little cost."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def resident_bytes() -> int:
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


def kept_after(traced: bool, folder: Path, measure: object) -> list[int]:
    """``measure()`` after step 20 and after step 300 of a run on two ranks."""
    found: list[int] = []

    def work(transport: Transport) -> None:
        config = little.config(
            sequences=2 * ROWS, microbatch=ROWS, run__steps=STEPS, run_dir=str(folder), trace__enabled=traced
        )
        with Trainer(config, [Scaled, Scaled], little.square_loss, transport=transport) as trainer:
            batch = little.batch(0, 2 * ROWS, WIDTH)
            for step in range(1, STEPS + 1):
                trainer.step(batch)
                if step in (WARM, STEPS) and transport.rank == 0:
                    found.append(measure())  # type: ignore[operator]

    run_ranks(2, work)
    return found


@pytest.mark.parametrize("traced", [False, True], ids=["without trace", "with trace"])
def test_memory_stays_flat_over_300_steps(traced: bool, tmp_path: Path) -> None:
    """As reported: losses and outputs were kept from step to step. Resident memory, the number of tensors, and what
    Python has allocated, after step 20 and after step 300. (HDF5 keeps up to 12 MB of its own for a trace.)
    """

    def measure() -> tuple[int, int, int]:
        return tensors_alive(), resident_bytes(), tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        (tensors, resident, allocated), last = kept_after(traced, tmp_path, measure)  # type: ignore[misc]
    finally:
        tracemalloc.stop()
    assert last[0] < tensors + STEPS // 10  # type: ignore[index]
    assert last[1] - resident < LEAK_BYTES // 2  # type: ignore[index]
    assert last[2] - allocated < (150_000 if traced else 30_000)  # type: ignore[index]


def test_the_loss_that_is_told_is_the_true_one_once_a_step(tmp_path: Path) -> None:
    """As reported: the loss exists on the last rank only, and the first printed -1. Rank 0's lines and the metrics
    hold the loss of one rank without a pipeline.
    """
    tokens = np.random.default_rng(1).integers(0, tiny.VOCAB, 40 * tiny.SEQUENCE + 1)
    write_tokens(tmp_path / "t.h5", [tokens], tiny.VOCAB, "none")

    def run(p: int) -> tuple[list[str], list[dict[str, object]]]:
        config = tiny.config(
            run_dir=str(tmp_path / str(p)),
            run__steps=4,
            model__layers=4,
            data__train=[str(tmp_path / "t.h5")],
            trace__enabled=False,
        )
        out = io.StringIO()

        def work(transport: Transport) -> None:
            with step_progress(1, out if transport.rank == 0 else io.StringIO(), bar=False) as show:
                train_run(config, transport, report=show)

        run_ranks(p, work)
        metrics = RunPaths(tmp_path / str(p)).metrics.read_text().splitlines()
        return out.getvalue().splitlines(), [json.loads(line) for line in metrics]

    _, expected = run(1)
    for p in (2, 4):
        told, metrics = run(p)
        steps = [line.split("  ")[:2] for line in told if "/4  loss " in line]
        assert steps == [[f"step {line['step']}/4", f"loss {line['loss']:.4f}"] for line in expected]
        assert [(line["step"], line["loss"]) for line in metrics] == [(n["step"], n["loss"]) for n in expected]
        assert [line["step"] for line in metrics] == [1, 2, 3, 4]
        assert sum(line.startswith("  stage ") for line in told) == p  # the split is told too


@pytest.mark.parametrize("p, schedule", [(1, "1f1b"), (2, "1f1b"), (2, "zb-h1")])
def test_nothing_holds_a_batch_after_its_step(p: int, schedule: str) -> None:
    """As found: until the next step began, two batches were in memory while a loader made the second."""
    width = 16

    def aligned(step: int) -> tuple[torch.Tensor, weakref.ref[Any]]:
        """A tensor in memory that tells when it is let go of, so that microbatches lie in it as they are."""
        memory = np.zeros(4 * width + ALIGNMENT, dtype=np.float32)
        first = -memory.ctypes.data % ALIGNMENT // memory.itemsize
        values = memory[first : first + 4 * width].reshape(4, width)
        values += step
        return torch.from_numpy(values), weakref.ref(memory)

    def work(transport: Transport) -> list[bool]:
        layers = [little.linear(width) for _ in range(2)]
        trainer = Trainer(little.config(schedule=schedule), layers, little.square_loss, transport=transport)
        held = []
        for step in range(3):
            (inputs, one), (targets, other) = aligned(step), aligned(step + 1)
            if step < 2:
                trainer.step((inputs, targets))
            else:
                trainer.evaluate([(inputs, targets)])
            assert one() is not None
            del inputs, targets
            held += [one() is not None, other() is not None]
        return held

    assert run_ranks(p, work) == [[False] * 6] * p
