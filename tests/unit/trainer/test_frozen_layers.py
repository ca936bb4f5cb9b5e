"""Parts of a model that are not trained, and ranks that have nothing to train."""

from __future__ import annotations

from pathlib import Path

import little
import pytest
import torch
from torch import nn

from mpipipe.errors import ConfigError
from mpipipe.trainer import Trainer
from mpipipe.transport import Transport, run_ranks

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
