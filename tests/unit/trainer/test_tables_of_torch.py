"""Training on the tables of torch's own schedule classes, dumped by torch: the bits of one rank where the table makes
weight gradients in microbatch order, else its own bits again and within 1e-6.

torch's classes are built without ranks or models: on stages that only say how many there are.
"""

from __future__ import annotations

import csv
import functools
import re
from pathlib import Path
from typing import Any

import little
import numpy as np
import pytest
from torch import nn
from torch_stub import stage

from mpipipe.schedule.exchange import load_table

pytestmark = pytest.mark.slow

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

M, MICROBATCH, STEPS, CLIP = 8, 2, 3, 0.3
SEQUENCES = M * MICROBATCH - 1
"""The last microbatch has one less."""

OF_ONE_STAGE = ("ScheduleGPipe", "Schedule1F1B")
OF_SEVERAL = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
UNORDERED = ("ScheduleLoopedBFS",)
"""Backwards of the last microbatch first."""

FORMS = ("compute_only", "compute_comms")
"""torch's dumps: without messages, and with messages and what else its runtime does."""

CASES = [
    *((name, p, 1, "drawn") for name in OF_ONE_STAGE for p in (2, 4)),
    *((name, p, v, form) for name in OF_SEVERAL for p in (2, 4) for v in (1, 2, 3) for form in FORMS),
    *((name, p, 2, form) for name in V_SHAPED for p in (2, 4) for form in FORMS),
]


def dump(name: str, p: int, v: int, form: str, path: Path) -> None:
    """Write torch's table: those of one stage a rank as torch draws them, the others by torch's own dump."""
    kind: Any = getattr(schedules, name)
    if name in OF_ONE_STAGE:
        rows = kind(stage(0, p, p), M, loss_fn=print)._get_pipeline_order()
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows(as_run(rows[rank]) for rank in range(p))
        return
    indices = (0, 2 * p - 1) if name in V_SHAPED else range(0, v * p, p)
    kind([stage(index, p, v * p) for index in indices], M, loss_fn=print)._dump_csv(path, form)


def as_run(row: list[Any]) -> list[str]:
    """torch draws, and does not run, the forwards of 1F1B's last rank from 1 to m: as they run, from 0."""
    texts = ["" if action is None else str(action) for action in row]
    if not any(text.endswith(f"F{M}") for text in texts):
        return texts
    return [re.sub(r"(?<=F)\d+", lambda number: str(int(number[0]) - 1), text) for text in texts]


def layers() -> list[object]:
    """One for each of the twelve stages of p = 4, v = 3."""
    block = [lambda: nn.Sequential(nn.Linear(little.WIDTH, little.WIDTH), nn.Tanh(), nn.Dropout(0.2))]
    return [little.linear(), *block * 4, little.linear(), *block * 5, little.linear()]


def run_of(p: int, **keys: object) -> little.Outcome:
    config = little.config(sequences=SEQUENCES, microbatch=MICROBATCH, optimizer__clip_norm=CLIP, **keys)
    batches = [little.batch(step, SEQUENCES) for step in range(STEPS)]
    return little.train_on(p, layers, config, batches, tied=[("0.weight", "11.weight")], evaluate=lambda _: batches[:1])


@functools.cache
def one_rank() -> little.Outcome:
    found = run_of(1)
    assert all(norm > CLIP for _, norm in found.steps)
    return found


def check_close(found: little.Outcome, expected: little.Outcome) -> None:
    """Losses and norms to 1e-6 of their size, weights to 1e-6, which are about 1."""
    assert np.array(found.steps) == pytest.approx(np.array(expected.steps), rel=1e-6)
    assert found.evaluations == pytest.approx(expected.evaluations, rel=1e-6)
    assert found.parts.keys() == expected.parts.keys()
    for name, weight in expected.parts.items():
        assert float((found.parts[name] - weight).abs().max()) <= 1e-6, name


@pytest.mark.parametrize("name, p, v, form", CASES)
def test_training_on_a_table_of_torch(tmp_path: Path, name: str, p: int, v: int, form: str) -> None:
    path = tmp_path / "torch.csv"
    dump(name, p, v, form, path)
    table = load_table(path)
    assert (table.p, table.v, table.m) == (p, v, M)
    assert table.ordered == (name not in UNORDERED)
    found, expected = run_of(p, schedule=str(path), chunks=v), one_rank()
    if table.ordered:
        little.assert_same(found, expected)
        return
    little.assert_same(found, run_of(p, schedule=str(path), chunks=v))
    check_close(found, expected)
    assert found.steps != expected.steps
