"""Where the engine says it is: in a step, between steps, in a deadlock; and who reports a wait that ran out."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import little
import numpy as np
import pytest
import torch
from torch import nn

from mpipipe.cli.ranks import _fail
from mpipipe.errors import TransportError, TransportTimeoutError
from mpipipe.trainer import Trainer
from mpipipe.trainer.ending import end_job
from mpipipe.transport import MEETING_TAG, Transport, run_ranks, solo


class Asks(nn.Module):
    """Notes where its rank is at each call."""

    def __init__(self, transport: Transport, said: list[str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(little.WIDTH))
        self.transport, self.said = [transport], said

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.said.append(self.transport[0].standing().line())
        return x * self.weight


def test_a_place_is_told_in_the_words_of_the_table() -> None:
    def work(transport: Transport) -> list[str]:
        said = [transport.standing().line()]
        layers = [Asks(transport, said if transport.rank == number else []) for number in range(2)]
        with Trainer(little.config(sequences=2), layers, little.square_loss, transport=transport) as trainer:
            said.append(transport.standing().line())
            trainer.step(little.batch(0, 2))
            said.append(transport.standing().line())
            trainer.evaluate([little.batch(1, 2)])
            said.append(transport.standing().line())
        return said

    zero, one = run_ranks(2, work)
    end = ", not waiting; open: nothing"
    assert zero == [
        f"rank 0 outside of a step{end}",
        f"rank 0 before its first step{end}",
        f"rank 0 at 0F0 (row 0, step 1){end}",
        f"rank 0 at 0F1 (row 1, step 1), not waiting; open: {zero[3].partition('open: ')[2]}",
        f"rank 0 after step 1{end}",
        f"rank 0 at 0F0 (row 0, batch 1 of an evaluation){end}",
        f"rank 0 at 0F1 (row 1, batch 1 of an evaluation), not waiting; open: {zero[6].partition('open: ')[2]}",
        f"rank 0 after batch 1 of an evaluation{end}",
    ]
    assert "1 send (0SEND_F0 to rank 1)" in zero[3]
    assert one[2] == "rank 1 at 1F0 (row 0, step 1), not waiting; open: 1 receive (0SEND_F1 of rank 0)"


def test_a_rank_that_does_something_else_shows_in_the_graph() -> None:
    def work(transport: Transport) -> None:
        layers = [little.linear(), little.linear()]
        trainer = Trainer(little.config(sequences=2), layers, little.square_loss, transport=transport)
        trainer.step(little.batch(0, 2))
        if transport.rank == 1:
            transport.wait(transport.irecv(np.zeros(1, dtype=np.uint8), 0, MEETING_TAG + 1), "a word of rank 0")
        trainer.step(little.batch(1, 2))

    with pytest.raises(TransportError) as caught:
        run_ranks(2, work)
    assert caught.value.__notes__[0].splitlines() == [
        "rank 0 waits for 1SEND_B0 of rank 1, which is after step 1",
        "rank 1 waits for a word of rank 0, which is at 0RECV_B0 (row 2, step 2)",
        "they wait in a circle: rank 0 for rank 1, rank 1 for rank 0",
    ]


@pytest.fixture
def no_handler() -> Iterator[None]:
    """Without those of trainers that other tests have not closed."""
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGUSR2, before)


@pytest.mark.usefixtures("no_handler")
def test_the_signal_is_taken_while_a_trainer_is_open(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with Trainer(little.config(), [little.linear()], little.square_loss, transport=solo()) as trainer:
        trainer.step(little.batch(0))
        signal.raise_signal(signal.SIGUSR2)
    assert capfd.readouterr().err == "mpipipe: rank 0 after step 1, not waiting; open: nothing\n"
    assert signal.getsignal(signal.SIGUSR2) is before
    with (
        pytest.raises(KeyError),
        Trainer(little.config(), [little.linear()], little.square_loss, transport=solo()),
    ):
        raise KeyError
    assert signal.getsignal(signal.SIGUSR2) is before


class EndedError(BaseException):
    """Stands for the end of the process."""


class OneOfTwo:
    size = 2

    def __init__(self, rank: int, log: list[object]) -> None:
        self.rank, self.log = rank, log

    def abort(self, code: int) -> None:
        self.log.append(code)
        raise EndedError


@pytest.mark.parametrize("by_verb", [False, True])
@pytest.mark.parametrize("rank, told_by", [(0, None), (1, None), (1, 0)])
def test_one_rank_reports_a_wait_that_ran_out(
    rank: int, told_by: int | None, by_verb: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others give it the time to end them."""
    log: list[object] = []
    monkeypatch.setattr("time.sleep", lambda seconds: log.append(f"sleep {seconds:g}"))
    error = TransportTimeoutError("waited", rank=rank)
    error.told_by = told_by
    with pytest.raises(EndedError):
        (_fail(OneOfTwo(rank, log), error, False) if by_verb else end_job(OneOfTwo(rank, log), error))  # type: ignore[arg-type]
    assert log == ([1] if told_by is None else ["sleep 5", 1])
