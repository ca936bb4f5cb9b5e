"""Tables of a user's own: the bit contract over random ones, what layers do to their input, what ranks must have
alike, which bits to expect.
"""

from __future__ import annotations

import functools
import logging
import random
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import little
import numpy as np
import pytest
import tiny
import torch
from torch import nn

from mpipipe.errors import ConfigError
from mpipipe.model import Draw, KeyedLayer
from mpipipe.schedule import Action, Kind, ScheduleTable, find_problems
from mpipipe.schedule.exchange import save_table, table_text
from mpipipe.trainer import Trainer
from mpipipe.transport import Transport, run_ranks, solo

pytestmark = pytest.mark.slow

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


# --- the bit contract over random tables ---

ORDERED, UNORDERED = 200, 40
STEPS = 2
CLIP = 0.3
MICROBATCH = 2
"""Sequences of a microbatch; the last one of a batch may have one less."""


class Reader(nn.Module):
    """Multiplies with the transposed weight, as a head does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(little.WIDTH, little.WIDTH) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


class KeyedBlock(KeyedLayer):
    """A linear layer used twice, and dropout known by the sample."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.norm, self.linear = nn.LayerNorm(little.WIDTH), nn.Linear(little.WIDTH, little.WIDTH)

    def forward(self, x: torch.Tensor, draw: Draw | None = None) -> torch.Tensor:
        hidden = self.linear(torch.tanh(self.linear(self.norm(x))))
        return x + (hidden if draw is None else draw.dropout(hidden, 0.2, self.layer_name))


def twelve_layers() -> list[object]:
    """One for each of the twelve stages of p = 4, v = 3. Layers 0, 5 and 11 share a weight."""
    layers: list[object] = [little.linear() for _ in range(12)]
    layers[5] = layers[11] = Reader
    for index in (1, 6, 9):
        layers[index] = lambda index=index: KeyedBlock(str(index))
    for index in (3, 8):
        layers[index] = lambda: nn.Sequential(nn.Linear(little.WIDTH, little.WIDTH), nn.Tanh(), nn.Dropout(0.2))
    return layers


TIED = [("0.weight", "11.weight"), ("5.weight", "0.weight")]


def in_order(action: Action, done: set[Action]) -> bool:
    """Whether the stage has made the weight gradients of the microbatch before."""
    stage, kind, k = action
    if kind in (Kind.F, Kind.I) or k == 0:
        return True
    return Action(stage, Kind.B, k - 1) in done or Action(stage, Kind.W, k - 1) in done


def random_table(seed: int, *, ordered: bool) -> ScheduleTable:
    """The order of a random execution, legal by its making: any stage on any rank, B or I and W by the stage or by the
    microbatch; ``ordered``: forwards and I in any order, B and W in microbatch order."""
    rng = random.Random(seed)
    p, v, m = rng.choice((1, 2, 2, 3, 3, 4, 4)), rng.randint(1, 3), rng.choice((1, 2, 3, 3, 4, 4, 5, 5, 6, 6))
    last = p * v - 1
    placement = [s % p for s in range(p * v)] if rng.random() < 0.7 else [rng.randrange(p) for _ in range(p * v)]
    rng.shuffle(placement)
    share = [rng.choice((0.0, 0.5, 1.0)) for _ in placement]
    back = [[Kind.I if rng.random() < share[s] else Kind.B for _ in range(m)] for s in range(p * v)]
    liking = {kind: rng.choice((0.05, 1.0, 20.0)) for kind in Kind}  # deep first, broad first, weights late, ...
    ready = [Action(0, Kind.F, k) for k in range(m)]
    done: set[Action] = set()
    rows: list[list[str]] = [[] for _ in range(p)]
    while ready:
        due = [action for action in ready if not ordered or in_order(action, done)]
        action = rng.choices(due, [liking[one.kind] for one in due])[0]
        ready.remove(action)
        done.add(action)
        stage, kind, k = action
        rows[placement[stage]].append(str(action))
        if kind == Kind.F:
            ready.append(Action(stage, back[stage][k], k) if stage == last else Action(stage + 1, Kind.F, k))
        if kind in (Kind.B, Kind.I) and stage:
            ready.append(Action(stage - 1, back[stage - 1][k], k))
        if kind == Kind.I:
            ready.append(Action(stage, Kind.W, k))
    return ScheduleTable.from_rows(rows, name=f"random {seed}", v=v, m=m, placement=placement)


@dataclass
class Run:
    """Loss and norm of every step, the evaluation after the last, digests of all weights and moments; the weights."""

    story: tiny.Story
    loss: float
    weights: dict[str, torch.Tensor]

    def same_bits(self, other: Run) -> bool:
        return (self.story, self.loss) == (other.story, other.loss)


def run_of(p: int, sequences: int, **keys: object) -> Run:
    """Two steps, and an evaluation, of the twelve layers on p ranks."""
    config = little.config(sequences=sequences, microbatch=MICROBATCH, optimizer__clip_norm=CLIP, **keys)
    weights: dict[str, torch.Tensor] = {}

    def work(transport: Transport) -> tuple[tiny.Story, float]:
        with Trainer(config, twelve_layers(), little.square_loss, tied=TIED, transport=transport) as trainer:
            reports = [trainer.step_report(little.batch(step, sequences)) for step in range(STEPS)]
            loss = trainer.evaluate([little.batch(STEPS, 3)])
            weights.update({name: weight.detach().clone() for name, weight in trainer.model.parameters.items()})
            return tiny.Story([(report.loss, report.grad_norm) for report in reports], tiny.digests(trainer)), loss

    stories, losses = zip(*run_ranks(p, work), strict=True)
    assert len(set(losses)) == 1
    return Run(tiny.merge(list(stories)), losses[0], weights)


@functools.cache
def one_rank(sequences: int) -> Run:
    return run_of(1, sequences)


def run_table(table: ScheduleTable, sequences: int, folder: Path) -> Run:
    path = folder / "random.csv"
    path.write_text(table_text(table, "csv"))
    return run_of(table.p, sequences, schedule=str(path), chunks=table.v)


def sequences_for(seed: int, table: ScheduleTable) -> int:
    return max(MICROBATCH, MICROBATCH * table.m - seed % 2)


def out_of_order(table: ScheduleTable, kind: Kind) -> bool:
    """Whether a stage does ``kind`` for a microbatch before it does it for a lower one."""
    orders = [table.microbatches[(table.stages == s) & (table.kinds == kind)] for s in range(table.num_stages)]
    return any(bool((order[1:] < order[:-1]).any()) for order in orders)


def features(table: ScheduleTable) -> list[str]:
    """What is special about a table."""
    kinds = [set(table.kinds[table.stages == stage].tolist()) for stage in range(table.num_stages)]
    found = {
        f"p = {table.p}": True,
        f"v = {table.v}": True,
        f"m = {table.m}": True,
        "a whole backward": any(int(Kind.B) in one for one in kinds),
        "a split backward": any(int(Kind.I) in one for one in kinds),
        "a stage with both": any({int(Kind.B), int(Kind.I)} <= one for one in kinds),
        "forwards out of order": out_of_order(table, Kind.F),
        "input gradients out of order": out_of_order(table, Kind.I),
        "a rank without a stage": len(set(table.placement)) < table.p,
        "neighbours on one rank": any(one == other for one, other in pairwise(table.placement)),
    }
    return [name for name, holds in found.items() if holds]


def test_random_ordered_tables_have_the_bits_of_one_rank(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    for seed in range(ORDERED):
        table = random_table(seed, ordered=True)
        assert table.ordered
        assert find_problems(table) == []
        sequences = sequences_for(seed, table)
        found, expected = run_table(table, sequences, tmp_path), one_rank(sequences)
        assert found.story.steps == expected.story.steps, table
        assert found.story.state == expected.story.state, table
        assert found.loss == expected.loss, table
        seen.update(features(table))
    assert len(seen) == 4 + 3 + 6 + 7
    assert min(seen.values()) >= 10, seen


def test_random_unordered_tables_repeat_themselves_and_stay_close(tmp_path: Path) -> None:
    """Over two steps losses and norms are within 1e-6 of their size, weights within 1e-6, which are about 1; and a
    second run repeats all bits."""
    tables = ((seed, random_table(seed, ordered=False)) for seed in range(1000, 1200))
    unordered = [(seed, table) for seed, table in tables if not table.ordered][:UNORDERED]
    assert len(unordered) == UNORDERED
    other_bits = 0
    for seed, table in unordered:
        assert find_problems(table) == []
        sequences = sequences_for(seed, table)
        found, expected = run_table(table, sequences, tmp_path), one_rank(sequences)
        assert found.same_bits(run_table(table, sequences, tmp_path)), table
        other_bits += not found.same_bits(expected)
        assert np.array(found.story.steps) == pytest.approx(np.array(expected.story.steps), rel=1e-6), table
        assert found.loss == pytest.approx(expected.loss, rel=1e-6), table
        for name, weight in expected.weights.items():
            assert float((found.weights[name] - weight).abs().max()) <= 1e-6, (table, name)
    assert other_bits >= UNORDERED // 2  # two addends are the same sum in both orders


def test_dropout_clipping_and_the_tie_act_in_these_runs() -> None:
    """The runs above would be alike trivially without them."""
    found = one_rank(8)
    assert all(norm > CLIP for _, norm in found.story.steps)
    assert {"value 0.weight", "value 5.weight", "value 11.weight"} & found.story.state.keys() == {"value 0.weight"}
    assert len(found.story.state) == 3 * len(found.weights)
    config = little.config(sequences=8, microbatch=MICROBATCH)
    with Trainer(config, twelve_layers(), little.square_loss, tied=TIED, transport=solo()) as trainer:
        assert trainer.evaluate([little.batch(0, 8)]) != pytest.approx(found.story.steps[0][0], rel=1e-3)
