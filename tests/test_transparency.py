"""The bit contract (README, "What you can rely on"): how a model is cut and what runs when changes no bit of a run."""

from __future__ import annotations

import functools

import pytest
import tiny

from mpipipe.schedule import build, names
from mpipipe.transport import Transport, run_ranks, solo

pytestmark = pytest.mark.slow


@functools.cache
def reference(sequences: int, tied: bool) -> tiny.Story:
    """One rank, one chunk."""
    return tiny.merge([tiny.run(tiny.config(sequences=sequences, model__tie_embeddings=tied), solo())])


GRID = [
    (schedule, chunks, p, m, tied)
    for schedule, chunks in tiny.SCHEDULES
    for p, m, tied in ((1, 4, True), (2, 4, False), (3, 6, True), (4, 4, True), (4, 8, False))
    if tiny.takes(schedule, chunks, p, m)
]
"""Three steps each; every number of microbatches, for one step, is in test_grid.py."""


@pytest.mark.parametrize("schedule, chunks, p, m, tied", GRID)
def test_same_bits_for_every_cut_and_schedule(schedule: str, chunks: int, p: int, m: int, tied: bool) -> None:
    config = tiny.config(schedule=schedule, chunks=chunks, sequences=2 * m, model__tie_embeddings=tied)
    story = tiny.merge(run_ranks(p, lambda transport: tiny.run(config, transport)))
    expected = reference(2 * m, tied)
    assert story.steps == expected.steps
    assert story.state == expected.state


@pytest.mark.parametrize("p, chunks", [(2, 1), (2, 2), (4, 1), (3, 2)])
def test_same_bits_for_a_table_that_the_planner_chooses(p: int, chunks: int) -> None:
    config = tiny.config(schedule="auto", chunks=chunks)
    assert tiny.merge(run_ranks(p, lambda transport: tiny.run(config, transport))).state == reference(8, True).state


def test_a_batch_of_fewer_microbatches_keeps_the_placement_that_was_chosen() -> None:
    """As at the end of an epoch, on a table that was searched for more."""

    def work(transport: Transport, schedule: str) -> list[float | None]:
        with tiny.trainer(tiny.config(schedule=schedule, chunks=2 if transport.size > 1 else 1), transport) as made:
            return [made.step_report(tiny.batch(step, rows)).loss for step, rows in enumerate((8, 3, 8, 2))]

    expected = work(solo(), "1f1b")
    assert run_ranks(2, lambda transport: work(transport, "auto")) == [expected] * 2


def test_every_schedule_with_one_copy_of_each_stage_is_in_the_grid() -> None:
    asked = {schedule.partition(":")[0] for schedule, *_ in GRID}
    two_copies = {name for name in names() if build(name, p=4, m=8).mirror is not None}
    assert asked == set(names()) - two_copies
    assert two_copies == {"dualpipe", "chimera"}


def test_clipping_and_dropout_act_in_these_runs() -> None:
    """The grid above would hold trivially without them."""
    dropped, kept = reference(8, True), tiny.run(tiny.config(model__dropout=0.0), solo())
    free = tiny.run(tiny.config(optimizer__clip_norm=0.0), solo())
    assert all(norm > 0.3 for _, norm in dropped.steps)
    assert dropped.steps[0] != kept.steps[0]
    assert dropped.steps[0] == free.steps[0]
    assert dropped.state != free.state


@pytest.mark.parametrize("partition", ["even", [1, 2, 3, 6], [6, 3, 2, 1]])
def test_same_bits_for_every_partition(partition: object) -> None:
    config = tiny.config(pipeline__partition=partition)
    assert tiny.merge(run_ranks(4, lambda transport: tiny.run(config, transport))).state == reference(8, True).state


def test_the_last_microbatch_may_be_smaller() -> None:
    """7 sequences in microbatches of 3: weighting by tokens, whatever the cut."""
    config = tiny.config(sequences=7, microbatch=3)
    expected = tiny.run(config, solo())
    for p in (2, 3):
        story = tiny.merge(run_ranks(p, lambda transport: tiny.run(config, transport)))
        assert (story.steps, story.state) == (expected.steps, expected.state)
    whole = tiny.run(tiny.config(sequences=7, microbatch=7), solo())
    for (loss, norm), (other_loss, other_norm) in zip(expected.steps, whole.steps, strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-6)
        assert norm == pytest.approx(other_norm, rel=1e-5)


@pytest.mark.parametrize("p, chunks, schedule", [(2, 2, "interleaved"), (1, 1, "1f1b"), (3, 1, "gpipe")])
def test_resuming_at_another_depth_changes_no_bit(tmp_path: object, p: int, chunks: int, schedule: str) -> None:
    """Saved at p = 4 after 3 steps, gone on for 3 more elsewhere: equal to 6 steps that were never cut."""
    expected = tiny.run(tiny.config(), solo(), steps=6)

    def begin(transport: object) -> None:
        config = tiny.config(run_dir=str(tmp_path))
        with tiny.trainer(config, transport) as made:  # type: ignore[arg-type]
            for data in tiny.batches(config, 0, 3):
                made.step(data)
            made.save()

    def go_on(transport: object) -> tiny.Story:
        config = tiny.config(run_dir=str(tmp_path), schedule=schedule, chunks=chunks)
        with tiny.trainer(config, transport) as made:  # type: ignore[arg-type]
            assert made.restore() == 3
            story = tiny.Story()
            for data in tiny.batches(config, 3, 6):
                report = made.step_report(data)
                story.steps.append((report.loss, report.grad_norm))
            story.state = tiny.digests(made)
        return story

    run_ranks(4, begin)
    story = tiny.merge(run_ranks(p, go_on))
    assert story.steps == expected.steps[3:]
    assert story.state == expected.state
