"""What the checker accepts, the engine runs to its end; what the checker calls a deadlock stops it. Random tables over
loopback, which tells a deadlock from a run that goes on.
"""

from __future__ import annotations

import random

import little
import pytest
import torch
from torch import nn

from mpipipe.device import HostDevice
from mpipipe.engine import Engine, compile_program
from mpipipe.errors import TransportError
from mpipipe.schedule import Action, Kind, ScheduleTable, find_problems
from mpipipe.stage import Stage, StageLayer
from mpipipe.topology import stages_on
from mpipipe.trace import Recorder
from mpipipe.trainer.feed import TensorFeed
from mpipipe.transport import Transport, run_ranks

TABLES = 120


def random_table(seed: int) -> ScheduleTable:
    """A complete table with a random placement and the order of a random, and then disturbed, execution."""
    rng = random.Random(seed)
    p, v, m = rng.randint(1, 4), rng.randint(1, 2), rng.randint(1, 4)
    placement = [s % p for s in range(p * v)]
    rng.shuffle(placement)
    split = [rng.random() < 0.5 for _ in placement]
    ready = [Action(0, Kind.F, k) for k in range(m)]
    rows: list[list[Action]] = [[] for _ in range(p)]
    while ready:
        action = ready.pop(rng.randrange(len(ready)))
        stage, kind, k = action
        rows[placement[stage]].append(action)
        back = Kind.I if split[stage] else Kind.B
        if kind == Kind.F and stage + 1 < len(placement):
            ready.append(Action(stage + 1, Kind.F, k))
        elif kind == Kind.F:
            ready.append(Action(stage, back, k))
        elif kind in (Kind.B, Kind.I):
            if stage > 0:
                ready.append(Action(stage - 1, Kind.I if split[stage - 1] else Kind.B, k))
            if kind == Kind.I:
                ready.append(Action(stage, Kind.W, k))
    for _ in range(rng.choice((0, 0, 1, 4))):
        row = rng.choice(rows)
        i = rng.randrange(max(1, len(row) - 1))
        row[i : i + 2] = row[i : i + 2][::-1]
    texts = [[str(action) for action in row] for row in rows]
    return ScheduleTable.from_rows(texts, name=f"random {seed}", v=v, m=m, placement=placement)


def gradients(table: ScheduleTable) -> dict[str, torch.Tensor]:
    """The totals of every parameter after one run of the table, whatever the rank."""

    def work(transport: Transport) -> dict[str, torch.Tensor]:
        device = HostDevice()
        last = table.num_stages - 1
        stages = {}
        for stage in stages_on(table.placement, transport.rank):
            torch.manual_seed(100 + stage)
            layer = StageLayer(nn.Sequential(nn.Linear(little.WIDTH, little.WIDTH), nn.Tanh()), stage, str(stage))
            stages[stage] = Stage(stage, [layer], device, little.square_loss if stage == last else None)
        engine = Engine(transport, device, Recorder(None), stages, table.num_stages)
        feed = TensorFeed(little.batch(0, table.m), 1, device, draw_seed=1)
        for _ in range(2):  # twice: tags and buffers are used again
            engine.run(compile_program(table, transport.rank), feed)
        layers = [layer for stage in stages.values() for layer in stage.layers]
        return {n: g.finish().clone() for layer in layers for n, g in zip(layer.names, layer.gradients, strict=True)}

    return {name: total for found in run_ranks(table.p, work) for name, total in found.items()}


def one_rank(table: ScheduleTable) -> ScheduleTable:
    """The same stages and microbatches on one rank, one microbatch after the other."""
    stages = range(table.num_stages)
    row = [text for k in range(table.m)
           for text in [*(f"{s}F{k}" for s in stages), *(f"{s}B{k}" for s in reversed(stages))]]  # fmt: skip
    return ScheduleTable.from_rows([row], v=table.num_stages, m=table.m)


def test_the_engine_runs_what_the_checker_accepts_with_the_same_bits() -> None:
    ran = ordered = stopped = refused = 0
    for seed in range(TABLES):
        table = random_table(seed)
        kinds = {problem.kind for problem in find_problems(table)}
        if kinds - {"deadlock"}:
            refused += 1
            continue
        if kinds:
            stopped += 1
            with pytest.raises(TransportError, match="waits"):
                gradients(table)
            continue
        ran += 1
        found, expected = gradients(table), gradients(one_rank(table))
        assert found.keys() == expected.keys()
        for name, total in found.items():
            if table.ordered:
                assert torch.equal(total, expected[name]), (table, name)
            torch.testing.assert_close(total, expected[name], rtol=1e-5, atol=1e-5)
        ordered += table.ordered
    assert min(ran, ordered, refused) >= 10, (ran, ordered, stopped, refused)
    assert stopped >= 3, (ran, ordered, stopped, refused)


def test_an_unordered_table_repeats_its_own_bits() -> None:
    found = 0
    for seed in range(TABLES):
        table = random_table(seed)
        if table.ordered or find_problems(table):
            continue
        found += 1
        one, other = gradients(table), gradients(table)
        assert all(torch.equal(total, other[name]) for name, total in one.items())
        if found == 10:
            break
    assert found == 10
