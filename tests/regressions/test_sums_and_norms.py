"""One gradient, one norm, one division: what was reported of sums that depend on how a batch or a model is cut."""

from __future__ import annotations

import math

import little
import pytest
import tiny
import torch
from torch import nn

from mpipipe.device import HostDevice
from mpipipe.engine import Engine, compile_program
from mpipipe.schedule import build
from mpipipe.stage import Stage, StageLayer
from mpipipe.trace import Recorder
from mpipipe.trainer.feed import TensorFeed
from mpipipe.transport import Transport, run_ranks, solo

CUTS = [(1, "1f1b", 1), (2, "1f1b", 1), (3, "gpipe", 1), (4, "1f1b", 1), (1, "gpipe", 2), (2, "interleaved", 2)]
BETA1 = 0.9

Clipped = tuple[list[float], dict[str, torch.Tensor], dict[str, str]]
"""Norms of three steps, first moments after one, digests after all."""


def linear_stages(transport: Transport, num_stages: int) -> dict[int, Stage]:
    torch.manual_seed(transport.rank)
    module = nn.Linear(little.WIDTH, little.WIDTH)
    loss = little.square_loss if transport.rank == num_stages - 1 else None
    return {
        transport.rank: Stage(
            transport.rank, [StageLayer(module, transport.rank, str(transport.rank))], HostDevice(), loss
        )
    }


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("p", [1, 2, 3])
def test_gradients_over_several_calls_are_divided_once(p: int, name: str) -> None:
    """As reported: the schedule divided what had been accumulated at the end of every call, so that several calls a
    step gave a decaying average. Here the stages hold plain sums: one call of 8 microbatches, two of 4 and four of 2
    leave the same bits.
    """
    inputs, targets = little.batch(0, 8)

    def work(transport: Transport, calls: int) -> tuple[float, int, list[torch.Tensor]]:
        stages = linear_stages(transport, p)
        engine = Engine(transport, HostDevice(), Recorder(None), stages, p)
        m = 8 // calls
        program = compile_program(build(name, p=p, m=m), transport.rank)
        total, count = 0.0, 0
        for call in range(calls):
            rows = slice(call * m, (call + 1) * m)
            result = engine.run(program, TensorFeed((inputs[rows], targets[rows]), 1, HostDevice(), draw_seed=1))
            total, count = total + result.loss_sum, count + result.count
        gradients = [g.finish().clone() for stage in stages.values() for x in stage.layers for g in x.gradients]
        return total, count, gradients

    once = run_ranks(p, lambda transport: work(transport, 1))
    for calls in (2, 4):
        found = run_ranks(p, lambda transport, calls=calls: work(transport, calls))
        for (total, count, gradients), (total_once, count_once, gradients_once) in zip(found, once, strict=True):
            assert count == count_once
            assert total == pytest.approx(total_once, rel=1e-12)
            for one, other in zip(gradients, gradients_once, strict=True):
                assert torch.equal(one, other)
    assert once[-1][1] == 8


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_the_split_into_microbatches_does_not_change_three_steps(p: int, schedule: str) -> None:
    """As reported: a loss that looked right with gradients too large by the number of microbatches, and one slot for
    "the loss", so that under gpipe each backward began from the last microbatch's.
    """
    layers = [little.linear(), nn.Tanh, little.linear(), little.linear()]
    batches = [little.batch(step, 8) for step in range(3)]
    whole = little.train_on(
        1, lambda: layers, little.config(sequences=8, microbatch=8, optimizer__clip_norm=0.0), batches
    )
    for size in (1, 2, 4):
        config = little.config(schedule=schedule, sequences=8, microbatch=size, optimizer__clip_norm=0.0)
        found = little.train_on(p, lambda: layers, config, batches)
        for (loss, norm), (loss_whole, norm_whole) in zip(found.steps, whole.steps, strict=True):
            assert loss == pytest.approx(loss_whole, rel=1e-6)
            assert norm == pytest.approx(norm_whole, rel=1e-5)
        for name, value in whole.parts.items():
            torch.testing.assert_close(found.parts[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("p, schedule, chunks", CUTS)
def test_both_copies_of_a_tied_weight_stay_one_weight(p: int, schedule: str, chunks: int) -> None:
    """As reported: the head's copy of the embedding was left out of the sum and drifted away while the loss still
    fell; elsewhere the sum was a collective that ranks in the middle never entered. Bytes after five steps.
    """
    config = tiny.config(schedule=schedule, chunks=chunks, optimizer__lr=1e-2, model__layers=4)

    def work(transport: Transport) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[object]]:
        made = tiny.trainer(config, transport)
        begun = little.parts_of(made).get("embedding.tokens.weight", torch.empty(0)).clone()
        steps = [made.step_report(data).loss for data in tiny.batches(config, 0, 5)]
        return begun, little.parts_of(made), steps

    found = run_ranks(p, work)
    parts = {name: value for _, part, _ in found for name, value in part.items()}
    embedding, head = parts["embedding.tokens.weight"], parts["head.weight"]
    assert embedding.numpy().tobytes() == head.numpy().tobytes()
    assert not torch.equal(embedding, found[0][0])
    alone = run_ranks(1, work)[0]
    assert embedding.numpy().tobytes() == alone[1]["embedding.tokens.weight"].numpy().tobytes()
    assert all(steps == alone[2] for _, _, steps in found)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("p, schedule, chunks", CUTS)
def test_a_small_norm_clips_the_whole_model_by_one_factor(p: int, schedule: str, chunks: int, tied: bool) -> None:
    """As reported: each rank clipped by the norm of its own stage, or the tied weight counted twice. The first moments
    after one step are a tenth of the clipped gradient: over all ranks, each weight once, their norm is the limit.
    """

    def work(transport: Transport, limit: float) -> Clipped:
        cut = (schedule, chunks) if transport.size == p else ("1f1b", 1)
        config = tiny.config(
            schedule=cut[0],
            chunks=cut[1],
            model__layers=4,
            model__dropout=0.0,
            model__tie_embeddings=tied,
            optimizer__clip_norm=limit,
            optimizer__betas=(BETA1, 0.95),
        )
        made = tiny.trainer(config, transport)
        norms = [made.step_report(tiny.batch(0)).grad_norm]
        first = {name: made.optimizer.moments(name)[0].clone() for name in made.model.parameters}
        norms += [made.step_report(tiny.batch(step)).grad_norm for step in (1, 2)]
        return norms, first, tiny.digests(made)

    def of_all(ranks: list[Clipped]) -> float:
        moments = {name: value for _, first, _ in ranks for name, value in first.items()}
        squares = sum(float(value.double().square().sum()) for value in moments.values())
        return math.sqrt(squares) / (1.0 - BETA1)

    found = run_ranks(p, lambda transport: work(transport, 0.01))
    free = run_ranks(p, lambda transport: work(transport, 0.0))
    norm = free[0][0][0]
    assert norm == found[0][0][0] > 0.1
    assert of_all(free) == pytest.approx(norm, rel=1e-6)
    assert of_all(found) == pytest.approx(0.01 * norm / (norm + 1e-6), rel=1e-6)
    assert all(norms == found[0][0] for norms, _, _ in found)
    norms, _, states = work(solo(), 0.01)
    assert found[0][0] == norms
    merged = {name: digest for _, _, digests in found for name, digest in digests.items()}
    assert merged == states
