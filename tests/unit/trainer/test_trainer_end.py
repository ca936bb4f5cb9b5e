"""How a trainer ends: twice, with an error in its block, and with an error while it closes."""

from __future__ import annotations

import little
import pytest

from mpipipe.trainer import Trainer
from mpipipe.trainer.ending import end_job
from mpipipe.transport import Request, Transport, run_ranks, solo
from mpipipe.transport.loopback import LoopbackTransport


class SecondOfTwo:
    """A transport that notes with which code the job is ended."""

    rank, size = 1, 2

    def __init__(self) -> None:
        self.ended_with: list[int] = []

    def abort(self, code: int) -> None:
        self.ended_with.append(code)


@pytest.mark.parametrize("in_the_block, told", [(None, "OSError: no room"), (ValueError("mine"), "ValueError: mine")])
def test_an_error_while_the_trainer_closes_ends_the_job(
    in_the_block: Exception | None, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Left to the interpreter's end, a thread of the user would keep the rank, and the rank all others."""

    def full(recorder: object, complete: bool = True) -> None:
        raise OSError("no room")

    made = Trainer(little.config(), [little.linear()], little.square_loss, transport=solo())
    world = SecondOfTwo()
    monkeypatch.setattr(made, "transport", world)
    monkeypatch.setattr(made, "_owns_transport", True)
    monkeypatch.setattr(made, "_synchronize_clocks", lambda: None)
    monkeypatch.setattr("mpipipe.trainer.trainer.Recorder.close", full)
    made.__enter__()
    with pytest.raises(OSError, match="no room"):
        made.__exit__(None if in_the_block is None else type(in_the_block), in_the_block, None)
    assert world.ended_with == [1]
    said = capsys.readouterr().err
    assert said.startswith("mpipipe: rank 1 failed, the job ends\n")
    assert said.endswith(told + "\n")


class CountsCloses(LoopbackTransport):
    """A transport that can be used until it is closed, as MPI can."""

    closes = 0

    def irecv(self, memory: object, peer: int, tag: int) -> Request:
        assert not self.closes, "used after it was closed"
        return super().irecv(memory, peer, tag)

    def close(self) -> None:
        self.closes += 1


def test_a_trainer_may_be_closed_inside_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(transport: Transport) -> int:
        mine = CountsCloses(transport._world, transport.rank)  # type: ignore[attr-defined]
        monkeypatch.setattr("mpipipe.trainer.trainer.open_or_end", lambda: mine)
        with Trainer(little.config(), [little.linear(), little.linear()], little.square_loss) as trainer:
            trainer.step(little.batch(0))
            trainer.close()
            trainer.close()
        return mine.closes

    assert run_ranks(2, work) == [1, 1]


def test_an_error_after_the_end_is_the_rank_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI has been finalized: nobody waits any more, and MPI_Abort can't be called."""
    made = Trainer(little.config(), [little.linear()], little.square_loss, transport=solo())
    world = SecondOfTwo()
    monkeypatch.setattr(world, "close", lambda: None, raising=False)
    monkeypatch.setattr(made, "transport", world)
    monkeypatch.setattr(made, "_owns_transport", True)
    monkeypatch.setattr(made, "_synchronize_clocks", lambda: None)

    def block() -> None:
        with made:
            made.close()
            raise ValueError("afterwards")

    with pytest.raises(ValueError, match="afterwards"):
        block()
    assert world.ended_with == []


def test_an_interrupt_of_a_script_takes_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C reaches every rank; the first one tells, and ends the others while they wait."""
    waited: list[float] = []
    monkeypatch.setattr("mpipipe.trainer.ending.time.sleep", waited.append)
    world = SecondOfTwo()
    end_job(world, KeyboardInterrupt())  # type: ignore[arg-type]
    assert (waited, world.ended_with) == ([1.0], [1])
    assert capsys.readouterr().err == "mpipipe: rank 1 was interrupted, the job ends\n"
