"""One division in all: sums of token losses over the valid labels of the whole batch, however they are spread (B01,
B02).
"""

from __future__ import annotations

import math

import pytest
import tiny
import torch
from torch.nn import functional

from mpipipe.model import IGNORED_LABEL
from mpipipe.trainer import Trainer
from mpipipe.transport import Transport, run_ranks, solo

SPARSE = (1, 3, 7, 8)
"""Valid labels of each of four sequences of 8."""


def batch(valid: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = tiny.batch(0, len(valid))
    for row, count in zip(targets, valid, strict=True):
        row[count:] = IGNORED_LABEL
    return inputs, targets


def one_step(p: int, microbatch: int, valid: tuple[int, ...], **keys: object) -> tuple[tiny.Story, Trainer]:
    asked = tiny.config(
        sequences=len(valid), microbatch=microbatch, model__dropout=0.0, optimizer__clip_norm=0.0, **keys
    )
    trainers: list[Trainer] = []

    def work(transport: Transport) -> tiny.Story:
        made = tiny.trainer(asked, transport)
        report = made.step_report(batch(valid))
        trainers.append(made)
        return tiny.Story([(report.loss, report.grad_norm)], tiny.digests(made))

    return tiny.merge(run_ranks(p, work)), trainers[0]


def plain_loss_and_norm(valid: tuple[int, ...]) -> tuple[float, float]:
    """The same by one call of torch over the whole batch."""
    made = tiny.trainer(tiny.config(model__dropout=0.0), solo())
    inputs, targets = batch(valid)
    value = inputs
    for module in made.model.modules:
        value = module(value)
    loss = functional.cross_entropy(value.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL)
    gradients = torch.autograd.grad(loss, list(made.model.parameters.values()), allow_unused=True)
    head = made.model.modules[-1].weight  # the tied copy is a leaf of its own
    (of_head,) = torch.autograd.grad(
        functional.cross_entropy(
            made.model.modules[-1](value_before_head(made, inputs)).flatten(0, 1),
            targets.flatten(),
            ignore_index=IGNORED_LABEL,
        ),
        head,
    )
    names = list(made.model.parameters)
    found = dict(zip(names, gradients, strict=True))
    found["embedding.tokens.weight"] = found["embedding.tokens.weight"] + of_head
    return loss.item(), math.sqrt(sum(float(g.double().square().sum()) for g in found.values() if g is not None))


def value_before_head(made: Trainer, inputs: torch.Tensor) -> torch.Tensor:
    value = inputs
    with torch.no_grad():
        for module in made.model.modules[:-1]:
            value = module(value)
    return value


@pytest.mark.parametrize("valid", [SPARSE, (8, 0, 0, 5), (0, 0, 0, 1)], ids=["sparse", "two without", "one label"])
@pytest.mark.parametrize("microbatch", [4, 2, 1])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_loss_and_norm_do_not_depend_on_where_the_valid_labels_lie(
    p: int, microbatch: int, valid: tuple[int, ...]
) -> None:
    story, made = one_step(p, microbatch, valid)
    loss, norm = plain_loss_and_norm(valid)
    assert made.last_report is not None
    assert made.last_report.tokens == sum(valid)
    assert story.steps[0][0] == pytest.approx(loss, rel=1e-6)
    assert story.steps[0][1] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("p", [1, 3])
def test_a_batch_without_a_valid_label_changes_nothing(p: int) -> None:
    """On every rank alike, with a reason; the next step is as if it had not been."""

    def work(transport: Transport) -> list[dict[str, str]]:
        made = tiny.trainer(tiny.config(sequences=4, model__dropout=0.0, lr__schedule="constant"), transport)
        states = [tiny.digests(made)]
        report = made.step_report(batch((0, 0, 0, 0)))
        assert report.loss is None
        assert report.skipped == "no label of the batch is valid"
        assert report.tokens == 0
        states.append(tiny.digests(made))
        made.step(batch(SPARSE))
        states.append(tiny.digests(made))
        return states

    for before, skipped, after in run_ranks(p, work):
        assert before == skipped
        assert after != skipped
