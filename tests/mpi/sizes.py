"""Runs on every rank of an MPI launch: training, and messages of hard sizes, under whatever the launch's environment
says of the MPI library's protocols.

``mpirun -n P python tests/mpi/sizes.py [synchronous] [big] [eager:BYTES ...] [rendezvous:BYTES ...]``. Prints as
ranks.py does. ``eager:BYTES``, ``rendezvous:BYTES``: what the library does with a message of so many bytes is checked
first. ``synchronous``: every send is MPI_Issend, which is complete only when its receive has begun. ``big``: one
message beyond 2 GiB, and nothing else.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

import numpy as np

import ranks  # isort: skip  (it makes tests/ importable)
import little
import tiny
import torch
from torch import nn

import mpipipe.transport.mpi as mpi_transport
from mpipipe import collectives
from mpipipe.trainer import Trainer
from mpipipe.transport import Transport, solo

Check = Callable[[Transport], None]

PIECE = 1000
TIMEOUT_S = 40.0
CUTS = (("1f1b", 1), ("interleaved", 2), ("zb-v", 2))
STEPS = 2
SEQUENCES, LENGTH, WIDTH = 8, 64, 24

BIG = (1 << 31) + 12_345
"""Bytes, and elements: more than the 2**31 - 1 that a C int counts."""


def send_synchronously() -> None:
    """Make every send of the world, and of communicators made from it, wait for its receive. Before MPI is opened."""
    import mpi4py

    mpi4py.rc.finalize, mpi4py.rc.thread_level = False, "serialized"
    from mpi4py import MPI

    class Synchronous(MPI.Intracomm):
        Isend, Send, Send_init = MPI.Intracomm.Issend, MPI.Intracomm.Ssend, MPI.Intracomm.Ssend_init

    MPI.COMM_WORLD = Synchronous(MPI.COMM_WORLD)


def check_protocol(transport: Transport, nbytes: int, eager: bool) -> None:
    """A send is complete before its receive has begun, or it is not. The receiver is in MPI meanwhile."""
    complete = False
    if transport.rank == 0:
        send = transport.isend(np.zeros(nbytes, dtype=np.uint8), 1, 21)
        deadline = time.monotonic() + (10.0 if eager else 0.1)
        while not complete and time.monotonic() < deadline:
            complete = send.test()
    collectives.barrier(transport)
    if transport.rank == 0:
        transport.wait(send, "the send")
    elif transport.rank == 1:
        transport.wait(transport.irecv(np.zeros(nbytes, dtype=np.uint8), 0, 21), "the message")
    assert transport.rank or complete == eager


def check_piece_edges(transport: Transport) -> None:
    """Messages around a multiple of the longest piece, all contents compared."""
    before, after = (transport.rank - 1) % transport.size, (transport.rank + 1) % transport.size
    for nbytes in (PIECE - 1, PIECE, PIECE + 1, 3 * PIECE - 1, 3 * PIECE, 3 * PIECE + 1):
        content = (np.arange(nbytes) * 7 % 251).astype(np.uint8)
        arrived = np.zeros(nbytes, dtype=np.uint8)
        receive = transport.irecv(arrived, before, 22)
        send = transport.isend(content, after, 22)
        transport.wait(receive, "the pieces")
        transport.wait(send, "the pieces")
        assert np.array_equal(arrived, content), nbytes


def in_pieces(check: Check) -> Check:
    """``check`` with messages of at most PIECE bytes a call."""

    def checked(transport: Transport) -> None:
        whole, mpi_transport.MAX_PIECE_BYTES = mpi_transport.MAX_PIECE_BYTES, PIECE
        try:
            check(transport)
        finally:
            mpi_transport.MAX_PIECE_BYTES = whole

    return checked


# --- training ---


def gpt(transport: Transport, **keys: object) -> tiny.Story:
    """The tiny GPT with activations of 12 KiB."""
    config = tiny.config(sequences=SEQUENCES, comm__timeout_s=TIMEOUT_S, **ranks.WIDE, **keys)  # type: ignore[arg-type]
    return tiny.run(config, transport, STEPS)


class Narrow(nn.Module):
    """Reads its input in single precision and passes its output on in another one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.dtype = nn.Linear(WIDTH, WIDTH), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x.float())).to(self.dtype)


def halves(transport: Transport, **keys: object) -> tiny.Story:
    """Layers that pass on bfloat16 and float16 in turn, the last one single precision."""
    dtypes = [(torch.bfloat16, torch.float16)[k % 2] for k in range(11)] + [torch.float32]
    config = little.config(sequences=SEQUENCES, microbatch=2, comm__timeout_s=TIMEOUT_S, **keys)
    layers = [functools.partial(Narrow, dtype) for dtype in dtypes]
    with Trainer(config, layers, little.square_loss, transport=transport) as trainer:
        reports = [trainer.step_report(little.batch(step, SEQUENCES, LENGTH, WIDTH)) for step in range(STEPS)]
        return tiny.Story([(report.loss, report.grad_norm) for report in reports], tiny.digests(trainer))


@functools.cache
def one_rank(train: Callable[..., tiny.Story]) -> tiny.Story:
    return tiny.merge([train(solo())])


def same_bits(train: Callable[..., tiny.Story], schedule: str, chunks: int) -> Check:
    def check(transport: Transport) -> None:
        expected = one_rank(train)
        mine = train(transport, pipeline__schedule=schedule, pipeline__chunks=chunks)
        found = [tiny.Story(**one) for one in collectives.all_gather_objects(transport, asdict(mine))]
        for story in found:
            story.steps = [(loss, norm) for loss, norm in story.steps]
        whole = tiny.merge(found)
        assert whole.steps == expected.steps
        assert whole.state == expected.state

    return check


def checks(words: list[str]) -> Iterator[tuple[str, Check]]:
    for word in words:
        what, _, nbytes = word.partition(":")
        if nbytes:
            yield word, functools.partial(check_protocol, nbytes=int(nbytes), eager=what == "eager")
    yield "piece edges", in_pieces(check_piece_edges)
    for train in (gpt, halves):
        for schedule, chunks in CUTS:
            check = same_bits(train, schedule, chunks)
            yield f"{train.__name__} {schedule} v={chunks}", check
        yield f"{train.__name__} {schedule} v={chunks} in pieces", in_pieces(check)


# --- beyond 2 GiB ---


def check_a_big_message(transport: Transport) -> None:
    """From rank 0 to rank 1: compared at both ends, on both sides of every multiple of 2**30, and at many places."""
    edges = [0, *range(1 << 30, BIG, 1 << 30), BIG]
    places = [slice(max(0, edge - 4000), min(BIG, edge + 4000)) for edge in edges]
    places.append(slice(500_000, BIG, 1_000_003))  # meets none of the others
    transport.configure(timeout_s=200.0, wait="auto")
    memory = np.empty(BIG, dtype=np.uint8)
    generator = np.random.default_rng(4)
    marks = [generator.integers(1, 256, memory[place].size, dtype=np.uint8) for place in places]
    if transport.rank == 0:
        for place, mark in zip(places, marks, strict=True):
            memory[place] = mark
        transport.wait(transport.isend(memory, 1, 23), "the big send")
    elif transport.rank == 1:
        transport.wait(transport.irecv(memory, 0, 23), "the big message")
        for place, mark in zip(places, marks, strict=True):
            assert np.array_equal(memory[place], mark), place
    collectives.barrier(transport)


def main(words: list[str]) -> int:
    if "synchronous" in words:
        send_synchronously()
    if "big" in words:
        return ranks.run_checks(lambda transport: iter([("a big message", check_a_big_message)]))
    return ranks.run_checks(lambda transport: checks(words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
