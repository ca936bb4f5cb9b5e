"""Where a model is cut, what its layers draw, and how long its sequences are: none of it may show in the result."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest
import tiny
import torch

from mpipipe.model import IGNORED_LABEL, Draw
from mpipipe.trainer.feed import TensorFeed
from mpipipe.trainer.sameness import joined
from mpipipe.transport import Transport, run_ranks, solo

CUTS = [(2, "1f1b", 1), (4, "1f1b", 1), (3, "gpipe", 1), (1, "interleaved", 2), (2, "interleaved", 2)]
SEQUENCE = 16

Microbatches = list[tuple[torch.Tensor, torch.Tensor]]


def test_stages_do_not_start_from_weights_that_hang_on_the_cut() -> None:
    """As reported: every stage seeded alike, so stages began with equal weights, or with others for another p."""

    def initial(transport: Transport, schedule: str, chunks: int) -> tiny.Story:
        made = tiny.trainer(tiny.config(schedule=schedule, chunks=chunks, model__layers=4), transport)
        return tiny.Story(state=tiny.digests(made))

    expected = initial(solo(), "1f1b", 1).state
    for p, schedule, chunks in CUTS:
        story = tiny.merge(run_ranks(p, lambda t, s=schedule, v=chunks: initial(t, s, v)))
        assert story.state == expected
    matrices = [
        digest
        for name, digest in expected.items()
        if name.startswith("value") and name.endswith(("qkv.weight", "out.weight", "up.weight", "down.weight"))
    ]
    assert len(matrices) == len(set(matrices)) == 16


@pytest.mark.parametrize("p, schedule, chunks", CUTS)
def test_one_config_twice_is_one_run(p: int, schedule: str, chunks: int) -> None:
    """As reported: dropout drawn from one stream a process gave other results for another number of partitions, and
    for a second run of the same. Torch's own generator is moved in between, as a user's script may.
    """
    config = tiny.config(schedule=schedule, chunks=chunks, model__layers=4)
    stories = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        stories.append(tiny.merge(run_ranks(p, lambda transport: tiny.run(config, transport))))
    alone = tiny.run(tiny.config(model__layers=4), solo())
    without = tiny.run(tiny.config(model__layers=4, model__dropout=0.0), solo())
    assert stories[0] == stories[1]
    assert (stories[0].steps, stories[0].state) == (alone.steps, alone.state)
    assert alone.steps != without.steps


class Ragged:
    """A step's microbatches, each with a sequence length of its own; in place of the trainer's feed."""

    def __init__(self, batch: Microbatches, microbatch: int, device: Any, **given: Any) -> None:
        first = given.pop("first_sample", 0)
        self._feeds = []
        self.rows = self.checksum = 0
        for part in batch:
            self._feeds.append(TensorFeed(part, len(part[0]), device, first_sample=first + self.rows, **given))
            self.rows += len(part[0])
            self.checksum = joined(self.checksum, self._feeds[-1].checksum)
        self.num_microbatches = len(batch)

    def signatures(self, training: bool) -> list[Hashable]:
        return [feed.signatures(training)[0] for feed in self._feeds]

    def inputs(self, microbatch: int) -> object:
        return self._feeds[microbatch].inputs(0)

    def targets(self, microbatch: int) -> object:
        return self._feeds[microbatch].targets(0)

    def draw(self, microbatch: int) -> Draw | None:
        return self._feeds[microbatch].draw(0)


STEPS = [[16, 9, 16, 9], [9, 9, 16], [16], [3, 9, 12, 16, 1], [9, 16]]
"""Sequence lengths of the microbatches of each step: growing and shrinking, within a step and from one to the next."""


def ragged(step: int) -> Microbatches:
    return [tiny.batch(10 * step + k, 2 + k % 2, length) for k, length in enumerate(STEPS[step])]


def padded(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = [], []
    for part_inputs, part_targets in ragged(step):
        pad = (0, SEQUENCE - part_inputs.shape[1])
        inputs.append(torch.nn.functional.pad(part_inputs, pad))
        targets.append(torch.nn.functional.pad(part_targets, pad, value=IGNORED_LABEL))
    return torch.cat(inputs), torch.cat(targets)


def train_ragged(transport: Transport, **keys: object) -> tiny.Story:
    made = tiny.trainer(tiny.config(model__layers=4, model__sequence=SEQUENCE, **keys), transport)
    story = tiny.Story()
    for step in range(len(STEPS)):
        report = made.step_report(ragged(step))  # type: ignore[arg-type]
        story.steps.append((report.loss, report.grad_norm))
    story.state = tiny.digests(made)
    return story


@pytest.mark.parametrize("p, schedule, chunks", CUTS)
def test_sequences_of_16_and_9_in_one_step(p: int, schedule: str, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As reported: receive buffers were sized by the first microbatch, and a shorter one arrived in the wrong shape,
    or was cut in silence.
    """
    monkeypatch.setattr("mpipipe.trainer.trainer.TensorFeed", Ragged)
    expected = train_ragged(solo())
    story = tiny.merge(run_ranks(p, lambda t: train_ragged(t, schedule=schedule, chunks=chunks)))
    assert (story.steps, story.state) == (expected.steps, expected.state)


def test_short_sequences_weigh_by_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same steps with the short sequences padded to the longest, their padding ignored, in one microbatch."""
    keys = {"model__layers": 4, "model__sequence": SEQUENCE, "model__dropout": 0.0}
    made = tiny.trainer(tiny.config(sequences=12, microbatch=12, **keys), solo())
    whole = [made.step_report(padded(step)) for step in range(len(STEPS))]
    monkeypatch.setattr("mpipipe.trainer.trainer.TensorFeed", Ragged)
    story = tiny.merge(run_ranks(3, lambda t: train_ragged(t, model__dropout=0.0)))
    for (loss, norm), report in zip(story.steps, whole, strict=True):
        assert loss == pytest.approx(report.loss, rel=1e-5)
        assert norm == pytest.approx(report.grad_norm, rel=1e-4)


@pytest.mark.parametrize("p, schedule, chunks", CUTS)
def test_a_batch_of_8_in_microbatches_of_3(p: int, schedule: str, chunks: int) -> None:
    """3, 3 and 2 sequences: of the whole batch's loss each token has one share."""
    keys = {"model__layers": 4, "model__dropout": 0.0, "microbatch": 3}
    story = tiny.merge(run_ranks(p, lambda t: tiny.run(tiny.config(schedule=schedule, chunks=chunks, **keys), t)))
    expected = tiny.run(tiny.config(**keys), solo())
    assert (story.steps, story.state) == (expected.steps, expected.state)
    whole = tiny.run(tiny.config(**{**keys, "microbatch": 8}), solo())
    for (loss, norm), (loss_whole, norm_whole) in zip(story.steps, whole.steps, strict=True):
        assert loss == pytest.approx(loss_whole, rel=1e-5)
        assert norm == pytest.approx(norm_whole, rel=1e-4)
