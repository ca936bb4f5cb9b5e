"""Ranks that were given different batches say so instead of waiting for each other."""

from __future__ import annotations

from collections.abc import Callable

import little
import numpy as np
import pytest

from mpipipe.engine.agreement import Agreement
from mpipipe.errors import EngineError
from mpipipe.trainer import Trainer
from mpipipe.transport import Transport, run_ranks

A, B, C, D = ("a", 1), ("b", 2), ("c", 3), ("d", 4)


def outcomes(*runs: list[list[object]]) -> list[str]:
    """What each rank, given the signatures of its runs, meets: an error's text, or nothing."""

    def work(transport: Transport) -> str:
        agreement = Agreement(transport)
        found = ""
        for signatures in runs[transport.rank]:
            agreement.begin(True, 4, agreement.number(signatures))
            try:
                agreement.finish()
            except EngineError as error:
                found = str(error)
        return found

    return run_ranks(len(runs), work)


def test_equal_runs_agree() -> None:
    assert outcomes(*[[[A, A, B], [A, A, B], [A], [A, A, B]]] * 3) == ["", "", ""]


def test_placeholders_of_other_shapes_that_change_together_agree() -> None:
    assert outcomes([[A, A], [B, B], [A, A]], [[C, C], [D, D], [C, C]]) == ["", ""]


def test_another_number_of_microbatches_is_found_by_the_rank_after() -> None:
    found = outcomes([[A, A]], [[A, A]], [[A, A, A]], [[A, A, A]])
    assert [bool(text) for text in found] == [False, False, True, False]
    assert found[2] == (
        "rank 2 was given 3 microbatches, rank 1 2: every rank calls the trainer with the same arguments, in the same "
        "order"
    )


def test_a_shape_that_is_new_on_one_rank_only_is_found() -> None:
    found = outcomes([[A, A], [A, B]], [[A, A], [A, A]])
    assert found[0] == ""
    assert found[1].startswith("rank 1 was given inputs of other shapes than rank 0: ")


def rows(transport: Transport, trainer: Trainer) -> None:
    trainer.step(little.batch(1, 3 if transport.rank == 1 else 4))


def width(transport: Transport, trainer: Trainer) -> None:
    trainer.step(little.batch(1, 4, 2, little.WIDTH) if transport.rank == 1 else little.batch(1))


def kind(transport: Transport, trainer: Trainer) -> None:
    if transport.rank == 1:
        trainer.evaluate([little.batch(1)])
    else:
        trainer.step(little.batch(1))


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (rows, "rank 1 was given 3 sequences, rank 0 4"),
        (width, "rank 1 was given inputs of other shapes than rank 0"),
        (kind, "rank 0 does a step while rank 1 evaluates"),
    ],
)
def test_the_trainer_tells_on_a_later_step(second: Callable[[Transport, Trainer], None], words: str) -> None:
    def work(transport: Transport) -> None:
        trainer = Trainer(little.config(), [little.linear()] * 4, little.square_loss, transport=transport)
        trainer.step(little.batch(0))
        second(transport, trainer)

    with pytest.raises(EngineError, match=words):
        run_ranks(2, work)


def test_the_first_rank_waits_for_no_one() -> None:
    waited = []

    class Noting:
        rank, size = 0, 4

        def isend(self, memory: np.ndarray, peer: int, tag: int) -> object:
            return object()

        def wait(self, request: object, what: str) -> None:
            waited.append(what)

    agreement = Agreement(Noting())
    agreement.begin(True, 4, [A])
    agreement.check()
    assert waited == []
    agreement.finish()
    assert waited == ["rank 1 to begin the same step or evaluation"]
