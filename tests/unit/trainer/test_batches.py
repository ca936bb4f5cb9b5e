"""Batches of any structure, cut into microbatches."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import NamedTuple

import little
import numpy as np
import pytest
import torch
from torch import nn

from mpipipe.device import ALIGNMENT, HostDevice
from mpipipe.errors import DataError
from mpipipe.trainer import Trainer
from mpipipe.trainer.feed import TensorFeed, batch_size, map_tensors
from mpipipe.transport import solo


class Named(NamedTuple):
    left: torch.Tensor
    right: object


def rows(count: int, *shape: int) -> torch.Tensor:
    return torch.arange(count * int(np.prod(shape or (1,)))).view(count, *shape).float()


def feed(batch: tuple[object, object], microbatch: int, **given: object) -> TensorFeed:
    return TensorFeed(batch, microbatch, HostDevice(), **given)  # type: ignore[arg-type]


def test_microbatches_in_order_and_the_last_one_smaller() -> None:
    inputs, targets = rows(7, 2), rows(7)
    made = feed((inputs, targets), 3)
    assert (made.rows, made.num_microbatches) == (7, 3)
    for k, (start, stop) in enumerate([(0, 3), (3, 6), (6, 7)]):
        assert torch.equal(made.inputs(k), inputs[start:stop])
        assert torch.equal(made.targets(k), targets[start:stop])
    first, second, third = made.signatures(True)
    assert first == second != third


def test_draws_name_the_samples_of_the_whole_run() -> None:
    made = feed((rows(5), rows(5)), 2, draw_seed=9, step=3, first_sample=40)
    assert [made.draw(k).samples for k in range(3)] == [(40, 41), (42, 43), (44,)]
    assert (made.draw(0).seed, made.draw(0).step) == (9, 3)
    assert feed((rows(5), rows(5)), 2).draw(0) is None


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_every_microbatch_is_contiguous_and_aligned(size: int) -> None:
    made = feed((rows(9, 3), rows(9).view(9, 1).expand(9, 4)), size)
    for k in range(made.num_microbatches):
        for value in (made.inputs(k), made.targets(k)):
            assert isinstance(value, torch.Tensor)
            assert value.is_contiguous()
            assert value.data_ptr() % ALIGNMENT == 0


def test_structures_stay_what_they_are() -> None:
    inputs = {
        "pair": (rows(4), [rows(4, 2), None]),
        "named": Named(rows(4), {"deep": rows(4)}),
        "words": "as they are",
        "number": 3,
        "user": UserDict(x=rows(4)),
    }
    cut = feed((inputs, OrderedDict(a=rows(4))), 3).inputs(1)
    assert isinstance(cut, dict)
    assert isinstance(cut["pair"], tuple)
    assert isinstance(cut["pair"][1], list)
    assert cut["pair"][0].tolist() == [3.0]
    assert cut["pair"][1][1] is None
    assert isinstance(cut["named"], Named)
    assert cut["named"].right["deep"].tolist() == [3.0]
    assert (cut["words"], cut["number"]) == ("as they are", 3)
    assert cut["user"]["x"].tolist() == [3.0]


def test_signatures_tell_shapes_and_types_apart() -> None:
    target = rows(4)
    signatures = {
        feed((value, target), 4).signatures(True)[0]
        for value in (rows(4, 2), rows(4, 3), rows(4, 3, 1), rows(4, 2).double(), (rows(4, 2), rows(4)), [rows(4, 2)])
    }
    assert len(signatures) == 5  # a list of one tensor is the tensor


@pytest.mark.parametrize(
    "batch, words",
    [
        ((rows(4), rows(3)), r"found \[3, 4\]"),
        ((rows(0), rows(0)), r"found \[0\]"),
        ((torch.tensor(1.0), rows(1)), "found"),
        (("text", None), "no tensor"),
        ((np.zeros((4, 2)), rows(4)), "numpy.ndarray"),
        ((rows(4), {"x": {1, 2}}), "builtins.set"),
    ],
)
def test_what_can_not_be_cut_is_refused(batch: tuple[object, object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        batch_size(batch)
    trainer = Trainer(little.config(), [little.linear()], little.square_loss, transport=solo())
    with pytest.raises(DataError, match=words):
        trainer.step(batch)


def test_map_tensors_changes_tensors_only() -> None:
    assert map_tensors([torch.ones(2), "x", (None, 2.5)], lambda tensor: tensor.sum().item()) == [2.0, "x", (None, 2.5)]


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, little.WIDTH)

    def forward(self, batch: dict[str, object]) -> torch.Tensor:
        ids, scale = batch["ids"], batch["more"][1]  # type: ignore[index]
        return self.table(ids).mean(1) * scale * batch["factor"]


def nested(step: int) -> tuple[object, object]:
    inputs, targets = little.batch(step, 5)
    ids = (inputs.abs() * 5).long() % 11
    return {"ids": ids, "more": [None, inputs.abs()[:, :1]], "factor": 2.0}, (targets, {"weight": inputs.abs()[:, 0]})


def weighted(output: torch.Tensor, target: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> tuple[torch.Tensor, int]:
    values, more = target
    return ((output - values).square().sum(1) * more["weight"]).sum(), len(values)


@pytest.mark.parametrize("p, schedule, chunks", [(2, "1f1b", 1), (3, "gpipe", 1), (2, "interleaved", 2)])
def test_nested_batches_train_alike_on_any_ranks(p: int, schedule: str, chunks: int) -> None:
    def run(p: int, **keys: object) -> little.Outcome:
        layers = [Embeds, little.linear(), nn.ReLU, little.linear()]
        return little.train_on(
            p,
            lambda: layers,
            little.config(sequences=5, microbatch=2, **keys),
            [nested(k) for k in range(3)],
            loss_fn=weighted,
            evaluate=lambda number: [nested(7), nested(8)],
        )

    little.assert_same(run(p, schedule=schedule, chunks=chunks), run(1))


class ToFrequencies(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(x)


class FromFrequencies(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(x, n=little.WIDTH)


def test_complex_numbers_travel_between_ranks() -> None:
    def layers() -> list[object]:
        return [little.linear(), ToFrequencies, FromFrequencies, little.linear()]

    one = little.train_on(1, layers, little.config(), [little.batch(0), little.batch(1)])
    for p in (2, 4):
        little.assert_same(little.train_on(p, layers, little.config(), [little.batch(0), little.batch(1)]), one)
