"""B11 and B09: every layer of every cut is there once, and every number of microbatches runs."""

from __future__ import annotations

import little
import pytest

from mpipipe.errors import PartitionError
from mpipipe.trainer import Trainer
from mpipipe.transport import Transport, run_ranks, solo


def layers(count: int) -> list[object]:
    return [little.linear() for _ in range(count)]


@pytest.mark.parametrize("count", [5, 7, 10, 30])
def test_layers_that_do_not_divide(count: int) -> None:
    config = little.config(optimizer__lr=1e-4)
    batches = [little.batch(0)]
    expected = little.train_on(1, lambda: layers(count), config, batches)
    cuts = [(3, "1f1b", 1), (4, "1f1b", 1), (3, "gpipe", 1), *((p, "interleaved", 2) for p in (2, 3, 4))]
    for p, schedule, chunks in cuts:
        if p * chunks > count:
            continue  # refused: test_more_stages_than_layers_are_refused_alike
        found = little.train_on(
            p, lambda: layers(count), little.config(optimizer__lr=1e-4, schedule=schedule, chunks=chunks), batches
        )
        little.assert_same(found, expected)
        assert sorted(found.parts) == sorted(f"{k}.{key}" for k in range(count) for key in ("weight", "bias"))


def test_all_ranks_know_the_same_list_of_parameters() -> None:
    def names(transport: Transport) -> list[tuple[str, tuple[int, ...]]]:
        trainer = Trainer(little.config(), layers(7), little.square_loss, transport=transport)
        return [(info.name, info.shape) for info in trainer.model.everything]

    expected = names(solo())
    assert [name for name, _ in expected] == [f"{k}.{key}" for k in range(7) for key in ("weight", "bias")]
    for p in (2, 3, 4):
        assert all(found == expected for found in run_ranks(p, names))


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("interleaved", 3)])
def test_every_number_of_microbatches_runs_on_any_ranks(schedule: str, chunks: int) -> None:
    """Fewer microbatches than ranks, none dividing, and more, of a user's own layers; loopback finds a hang at once.
    Every schedule and number is in tests/test_grid.py.
    """
    for m in (1, 2, 3, 5, 8):
        batches = [little.batch(m, m)]
        expected = little.train_on(1, lambda: layers(12), little.config(), batches)
        for p in (3, 4):
            config = little.config(schedule=schedule, chunks=chunks)
            little.assert_same(little.train_on(p, lambda: layers(12), config, batches), expected)


@pytest.mark.parametrize("p, chunks, key", [(4, 1, "pipeline.ranks"), (2, 2, "pipeline.chunks")])
def test_more_stages_than_layers_are_refused_alike(p: int, chunks: int, key: str) -> None:
    def work(transport: Transport) -> str:
        config = little.config(schedule="gpipe", chunks=chunks)
        with pytest.raises(PartitionError) as caught:
            Trainer(config, layers(3), little.square_loss, transport=transport)
        assert caught.value.key == key
        return str(caught.value)

    assert len(set(run_ranks(p, work))) == 1


def test_a_listed_partition_that_does_not_add_up_is_refused() -> None:
    with pytest.raises(PartitionError, match=r"pipeline\.partition"):
        Trainer(little.config(pipeline__partition=[2]), layers(3), little.square_loss, transport=solo())
