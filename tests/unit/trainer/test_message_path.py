"""Which way messages leave the GPUs of a run: one decision for all ranks, one line, one error."""

from __future__ import annotations

import logging

import pytest
import torch

from mpipipe.config import Config
from mpipipe.device import Buffer, HostDevice
from mpipipe.errors import NotCudaAwareError
from mpipipe.trainer.path import decide_path, prove_here
from mpipipe.transport import Transport, run_ranks, solo
from mpipipe.transport.awareness import Finding
from mpipipe.transport.loopback import LoopbackTransport
from mpipipe.transport.proof import MessagePath, Proof

YES = Finding("a query", "yes", "the library was built with CUDA")


def comm(path: str) -> object:
    return Config.from_tables({"comm": {"path": path}}).comm


@pytest.mark.parametrize("path", ["auto", "cuda-aware"])
def test_one_rank_sends_nothing(path: str) -> None:
    assert decide_path(solo(), comm(path)).name == "staged"
    prove_here(solo(), HostDevice(), comm(path))


@pytest.mark.parametrize(
    "asked, holds, name, tries",
    [
        ("auto", True, "cuda-aware", 1),
        ("auto", False, "staged", 1),
        ("staged", True, "staged", 0),
        ("cuda-aware", False, "cuda-aware", 0),
    ],
)
def test_rank_0_decides_for_all(
    asked: str, holds: bool, name: str, tries: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Tries it once, and says in one line what was decided."""
    tried: list[tuple[str, str]] = []

    def prove(device: str, *, library: str) -> Proof:
        tried.append((device, library))
        return Proof(holds, "so it was seen")

    monkeypatch.setattr("mpipipe.trainer.path.prove", prove)
    monkeypatch.setattr(
        LoopbackTransport, "cuda_findings", lambda self: [YES] if self.rank == 0 else pytest.fail("only rank 0 asks")
    )
    with caplog.at_level(logging.INFO, logger="mpipipe"):
        found = run_ranks(3, lambda transport: decide_path(transport, comm(asked)))
    assert [path.name for path in found] == [name] * 3
    assert len(set(found)) == 1
    assert tried == [("cuda", "loopback (one process)")] * tries
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("messages leave the GPU ")
    assert f"({name}): {found[0].reason}" in line
    assert ("so it was seen" in line) is bool(tries)


def test_waits_last_as_long_as_a_proof_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(
        LoopbackTransport, "configure", lambda self, *, timeout_s, wait: limits.append(timeout_s), raising=True
    )
    settings = Config.from_tables({"comm": {"timeout_s": 7.0}}).comm
    found = run_ranks(2, lambda transport: decide_path(transport, settings))
    assert found == [MessagePath("staged", found[0].reason)] * 2
    assert sorted(limits) == [7.0, 7.0, 120.0, 120.0]
    limits.clear()
    run_ranks(2, lambda transport: prove_here(transport, HostDevice(), settings))
    assert limits == [7.0] * 4


class Wrong(HostDevice):
    def outgoing(self, tensor: torch.Tensor) -> Buffer:
        return super().outgoing(tensor + 1)


def test_wrong_bytes_are_one_error_of_all_ranks(caplog: pytest.LogCaptureFixture) -> None:
    """Also of those that got the right ones; and before it a line says what a crash would mean."""

    def work(transport: Transport) -> str:
        with pytest.raises(NotCudaAwareError, match=r'comm\.path = "staged"') as caught:
            prove_here(transport, Wrong() if transport.rank == 1 else HostDevice(), comm("cuda-aware"))
        assert caught.value.seen_alike
        return str(caught.value)

    with caplog.at_level(logging.INFO, logger="mpipipe"):
        assert len(set(run_ranks(4, work))) == 1
    assert sum("if the job crashes here" in record.getMessage() for record in caplog.records) == 1
