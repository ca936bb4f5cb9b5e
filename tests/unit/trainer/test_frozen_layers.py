"""Parts of a model that are not trained, and ranks that have nothing to train."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import little
import pytest
import spying
import torch
from torch import nn

from mpipipe.analysis import summary
from mpipipe.device import Memory
from mpipipe.engine import Engine, RunResult
from mpipipe.errors import ConfigError, EngineError
from mpipipe.trainer import Trainer
from mpipipe.transport import COLLECTIVE_TAG, Request, Transport, run_ranks

NAMES = [f"layer{k}" for k in range(6)]


def layers(trained: set[int]) -> list[object]:
    def make(index: int) -> object:
        def factory() -> nn.Module:
            return nn.Sequential(nn.Linear(little.WIDTH, little.WIDTH), nn.Tanh()).requires_grad_(index in trained)

        return factory

    return [make(index) for index in range(6)]


def run(p: int, trained: set[int], **keys: object) -> little.Outcome:
    config = little.config(optimizer__decay="all", **keys)
    batches = [little.batch(step) for step in range(3)]
    return little.train_on(p, lambda: layers(trained), config, batches, names=NAMES)


@pytest.mark.parametrize(
    "trained",
    [{2, 3, 4, 5}, {1, 2, 3, 4, 5}, {5}, {2}, {3}, {0}, {0, 5}],
    ids=lambda trained: "trains " + " ".join(map(str, sorted(trained))),
)
def test_frozen_layers_train_as_on_one_rank(trained: set[int]) -> None:
    expected = run(1, trained)
    untouched = {
        f"layer{k}.0.{key}": value
        for k, factory in enumerate(layers(trained))
        if k not in trained
        for key, value in seeded(k, factory)
    }
    for p, schedule, chunks in [(2, "1f1b", 1), (3, "1f1b", 1), (3, "gpipe", 1), (2, "interleaved", 3), (6, "1f1b", 1)]:
        found = run(p, trained, schedule=schedule, chunks=chunks)
        little.assert_same(found, expected)
        for name, value in untouched.items():
            assert torch.equal(found.parts[name], value), f"{name} is frozen and has changed"
    assert expected.steps[0][0] != expected.steps[2][0]
    assert {name.split(".")[0] for name in expected.parameters} == {f"layer{k}" for k in trained}


def seeded(index: int, factory: object) -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(5 * 1_000_003 + index)
    module = factory()  # type: ignore[operator]
    return list(module[0].state_dict().items())


@pytest.mark.parametrize("p", [1, 3])
def test_nothing_to_train_is_refused_alike(p: int) -> None:
    def work(transport: Transport) -> str:
        with pytest.raises(ConfigError, match="nothing to train") as caught:
            Trainer(little.config(), layers(set()), little.square_loss, transport=transport)
        return str(caught.value)

    assert len(set(run_ranks(p, work))) == 1


def test_a_frozen_run_is_saved_and_goes_on_elsewhere(tmp_path: Path) -> None:
    trained = {2}
    whole = run(1, trained)
    config = little.config(optimizer__decay="all", run_dir=str(tmp_path))

    def begin(transport: Transport) -> None:
        with Trainer(config, layers(trained), little.square_loss, names=NAMES, transport=transport) as trainer:
            trainer.step(little.batch(0))
            trainer.save()

    def go_on(transport: Transport) -> little.Outcome:
        with Trainer(config, layers(trained), little.square_loss, names=NAMES, transport=transport) as trainer:
            assert trainer.restore() == 1
            for step in (1, 2):
                trainer.step(little.batch(step))
            return little.Outcome(parts=little.parts_of(trainer))

    run_ranks(3, begin)
    parts = little.merged(run_ranks(2, go_on)).parts
    assert parts.keys() == whole.parts.keys()
    for name, value in whole.parts.items():
        assert torch.equal(parts[name], value), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_trained_weights_that_are_not_float32_are_refused_alike(dtype: torch.dtype) -> None:
    def work(transport: Transport) -> str:
        wide = [little.linear(), lambda: nn.Linear(little.WIDTH, little.WIDTH).to(dtype)]
        with pytest.raises(ConfigError, match=rf"parameter 1.weight is {dtype}.*float32") as caught:
            Trainer(little.config(), wide, little.square_loss, transport=transport)
        return str(caught.value)

    assert len(set(run_ranks(2, work))) == 1


def test_weights_that_lie_strided_in_memory_train_as_contiguous_ones() -> None:
    """The optimizer's kernel takes memory as it lies."""

    def strided() -> nn.Module:
        made = nn.Linear(little.WIDTH, little.WIDTH)
        made.weight = nn.Parameter(made.weight.detach().t().contiguous().t())
        assert not made.weight.is_contiguous()
        return made

    batches = [little.batch(step) for step in range(3)]
    expected = little.train_on(1, lambda: [little.linear(), little.linear()], little.config(), batches)
    for p in (1, 2):
        found = little.train_on(p, lambda: [strided, strided], little.config(), batches)
        assert [loss for loss, _ in found.steps] == pytest.approx([loss for loss, _ in expected.steps], rel=1e-6)
        torch.testing.assert_close(found.parts["0.weight"], expected.parts["0.weight"])


# --- what is left out: backward, kept activations and messages before the first trained layer ---

TABLES = [
    (1, "1f1b", 1), (2, "1f1b", 1), (3, "zb-h1", 1), (4, "gpipe", 1), (4, "1f1b", 1),
    (2, "interleaved", 2), (2, "zb-v", 2), (4, "zb-v", 2),
]  # fmt: skip

_lock = threading.Lock()


class _Note(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: int, notes: Counter[tuple[str, int]]) -> torch.Tensor:
        ctx.index, ctx.notes = index, notes
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        with _lock:
            ctx.notes["backward", ctx.index] += 1
        return gradient, None, None


class Noting(nn.Module):
    """Linear, norm and dropout; notes its forwards, those with an input that takes a gradient or an output that keeps
    a graph, and its backwards."""

    def __init__(self, index: int, notes: Counter[tuple[str, int]], trained: bool) -> None:
        super().__init__()
        self.index, self.notes = index, notes
        self.linear = nn.Linear(little.WIDTH, little.WIDTH)
        self.norm = nn.LayerNorm(little.WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.requires_grad_(trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.dropout(self.norm(self.linear(x))))
        with _lock:
            self.notes["forward", self.index] += 1
            self.notes["input", self.index] += x.requires_grad
            self.notes["graph", self.index] += y.requires_grad
        return _Note.apply(y, self.index, self.notes)  # type: ignore[no-any-return, no-untyped-call]


def noting(trained: set[int], notes: Counter[tuple[str, int]]) -> list[Any]:
    return [lambda index=index: Noting(index, notes, index in trained) for index in range(8)]


def noted(
    p: int, schedule: str, chunks: int, trained: set[int], **given: Any
) -> tuple[little.Outcome, Counter[tuple[str, int]], int, list[tuple[int, list[int]]]]:
    """Two steps of six microbatches: (what came out, notes, tensors sent between ranks, (rank, layers) of each
    stage)."""
    notes: Counter[tuple[str, int]] = Counter()
    config = little.config(schedule=schedule, chunks=chunks, sequences=12, microbatch=2, optimizer__decay="all")
    ranks: list[tuple[int, list[int]]] = []

    def work(transport: Transport) -> tuple[little.Outcome, int]:
        spy = spying.Spy(transport)
        layers, names = noting(trained, notes), [f"l{k}" for k in range(8)]
        with Trainer(config, layers, little.square_loss, names=names, transport=spy, **given) as trainer:
            steps = [trainer.step_report(little.batch(step, 12)) for step in range(2)]
            placement = trainer.model.placement
            cut = [list(trainer.model.partition.layers_of(stage)) for stage in range(len(placement))]
            found = little.Outcome([(one.loss, one.grad_norm) for one in steps], parts=little.parts_of(trainer))
            ranks[:] = [(place, cut[stage]) for stage, place in enumerate(placement)]
        return found, spy.tensors

    outcomes = run_ranks(p, work)
    return little.merged([one for one, _ in outcomes]), notes, sum(sent for _, sent in outcomes), ranks


@pytest.mark.parametrize("p, schedule, chunks", TABLES)
@pytest.mark.parametrize("trained", [{2, 3, 4, 5, 6, 7}, {4, 5, 6, 7}, {7}, {3}, {3, 5}, {0, 6}], ids=str)
def test_nothing_is_done_before_the_first_trained_layer(p: int, schedule: str, chunks: int, trained: set[int]) -> None:
    found, notes, sent, stages = noted(p, schedule, chunks, trained)
    first, times = min(trained), 2 * 6
    for layer in range(8):
        assert notes["forward", layer] == times
        assert notes["backward", layer] == notes["graph", layer] == (times if layer >= first else 0), layer
        assert notes["input", layer] == (times if layer > first else 0), layer
    messages = 0
    for (rank_before, _), (rank, members) in itertools.pairwise(stages):
        if rank != rank_before:
            messages += times * (2 if members[0] > first else 1)  # a gradient where a layer before it is trained
    assert sent == messages
    little.assert_same(found, noted(1, "1f1b", 1, trained)[0])


@pytest.mark.parametrize("p, schedule, chunks", [(3, "1f1b", 1), (2, "zb-v", 2), (3, "zb-h1", 1)])
def test_a_tied_weight_counts_where_its_first_part_is(p: int, schedule: str, chunks: int) -> None:
    pair = [("l3.linear.weight", "l7.linear.weight")]
    found, notes, _, _ = noted(p, schedule, chunks, {3, 7}, tied=pair)
    assert [notes["backward", layer] for layer in range(8)] == [0, 0, 0, 12, 12, 12, 12, 12]
    little.assert_same(found, noted(1, "1f1b", 1, {3, 7}, tied=pair)[0])


@pytest.mark.parametrize(
    "trained, peaks", [({0}, [4, 3, 2, 1]), ({2}, [0, 3, 2, 1]), ({5}, [0, 0, 2, 1]), ({7}, [0, 0, 0, 1])]
)
def test_frozen_stages_keep_no_microbatch(
    trained: set[int], peaks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, int] = {}
    run = Engine.run

    def noting_peaks(engine: Engine, *args: Any) -> RunResult:
        result = run(engine, *args)
        seen[engine._rank] = result.peak_live
        return result

    monkeypatch.setattr(Engine, "run", noting_peaks)
    noted(4, "1f1b", 1, trained)
    assert [seen[rank] for rank in range(4)] == peaks


class _OpenSends(spying.Spy):
    """Notes how many activations were on their way at once."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.sends: list[Request] = []
        self.most_sends = 0

    def isend(self, memory: Memory, peer: int, tag: int) -> Request:
        request = super().isend(memory, peer, tag)
        if tag < COLLECTIVE_TAG and tag % 2 == 0:
            self.sends = [one for one in self.sends if not one.test()] + [request]
            self.most_sends = max(self.most_sends, len(self.sends))
        return request


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_frozen_rank_is_not_far_ahead(schedule: str) -> None:
    """A rank that waits for no gradient must not pile up activations before a slower one."""

    def slow_loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        time.sleep(0.002)
        return little.square_loss(output, target)

    def work(transport: Transport) -> int:
        spy = _OpenSends(transport)
        config = little.config(schedule=schedule, sequences=24)
        with Trainer(config, layers({5}), slow_loss, transport=spy) as trainer:
            for step in range(2):
                trainer.step(little.batch(step, 24))
        return spy.most_sends

    assert run_ranks(2, work)[0] <= 2


def test_the_trace_expects_the_messages_that_are_sent(tmp_path: Path) -> None:
    config = little.config(sequences=6, run_dir=str(tmp_path), trace__enabled=True)

    def work(transport: Transport) -> None:
        with Trainer(config, layers({2, 4}), little.square_loss, names=NAMES, transport=transport) as trainer:
            for step in range(2):
                trainer.step(little.batch(step, 6))

    run_ranks(3, work)
    found = summary(tmp_path)
    assert found["messages"]["count_per_step"] == found["messages"]["expected_per_step"] == 6 * 3
    assert found["steps_left_out"] == []
    assert all(one["found"] == one["expected"] and one["found"]["B"] == 12 for one in found["events"])


@pytest.mark.parametrize("p", [1, 3])
def test_a_frozen_layer_that_changes_its_input_is_refused_as_a_trained_one(p: int) -> None:
    def work(transport: Transport) -> None:
        middle = [layers(set())[0], lambda: nn.ReLU(inplace=True), *layers({2})[2:]]
        trainer = Trainer(little.config(), middle, little.square_loss, transport=transport)
        trainer.step(little.batch(0))

    with pytest.raises(EngineError, match=r"layer 1 \(ReLU\) changed its input in place.*inplace=False"):
        run_ranks(p, work)
