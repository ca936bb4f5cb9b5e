"""Runs on every rank of an MPI launch: the transport's contract, then the bit contract's grid, in one launch.

``mpirun -n P python tests/mpi/ranks.py [part ...]``. Rank 0 prints one JSON line a check: {"check", "ok", "error"}. A
failure on any rank fails the check on all (an assert on one rank alone would leave the others waiting).
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import tiny
import torch
import transport_contract as contract

import mpipipe.transport.mpi as mpi_transport
from mpipipe import collectives
from mpipipe.collectives import all_gather_objects
from mpipipe.device import DeviceMemory
from mpipipe.errors import TransportTimeoutError
from mpipipe.transport import Transport, open_world, solo

torch.set_num_threads(1)

WIDE = {"model__hidden": 48, "model__sequence": 32}
"""Activations of 2 x 32 x 48 floats are 12 KiB: beyond the 4 KiB below which MPI sends at once and hides deadlocks."""


def check_pieces(transport: Transport) -> None:
    """A message longer than one MPI call may carry."""
    whole, mpi_transport.MAX_PIECE_BYTES = mpi_transport.MAX_PIECE_BYTES, 1000
    try:
        contract.check_a_ring(transport)
        contract.check_that_sends_never_block(transport)
    finally:
        mpi_transport.MAX_PIECE_BYTES = whole


def check_memory_by_address(transport: Transport) -> None:
    """Memory that NumPy has no array for, as a GPU's: here it is the host's, known by its address alone. Twice through
    the same memory, and in pieces.
    """
    before, after = (transport.rank - 1) % transport.size, (transport.rank + 1) % transport.size
    out, into = np.zeros(2500, dtype=np.uint8), np.zeros(2500, dtype=np.uint8)
    memory, arrived = (DeviceMemory(array.ctypes.data, array.nbytes, array) for array in (out, into))
    whole = mpi_transport.MAX_PIECE_BYTES
    for turn, piece in enumerate((whole, whole, 1000)):
        mpi_transport.MAX_PIECE_BYTES = piece
        try:
            out[:] = np.arange(2500) * 7 % 251 + transport.rank + turn
            receive = transport.irecv(arrived, before, 19)
            send = transport.isend(memory, after, 19)
            transport.wait(receive, "memory by its address")
            transport.wait(send, "memory by its address")
            assert np.array_equal(into, (np.arange(2500) * 7 % 251 + before + turn).astype(np.uint8))
            collectives.barrier(transport)
        finally:
            mpi_transport.MAX_PIECE_BYTES = whole
    assert memory.message is not None
    empty = DeviceMemory(0, 0)
    receive, send = transport.irecv(empty, before, 19), transport.isend(DeviceMemory(0, 0), after, 19)
    transport.wait(receive, "no memory")
    transport.wait(send, "no memory")


def check_findings(transport: Transport) -> None:
    """A query of the library that is loaded answers."""
    findings = {finding.source: finding.says for finding in transport.cuda_findings()}
    assert findings["MPIX_Query_cuda_support"] in ("yes", "no")


def check_a_wait_ends_in_time(transport: Transport) -> None:
    transport.configure(timeout_s=0.3, wait="auto")
    try:
        contract.check_a_wait_that_can_not_end(transport)
    except TransportTimeoutError as error:
        raise AssertionError("the wait's own error was expected to be caught by the check") from error
    finally:
        transport.configure(timeout_s=60.0, wait="auto")


def same_story(transport: Transport, mine: tiny.Story, expected: tiny.Story) -> None:
    """All ranks' stories together are ``expected``, in every bit. Collective."""
    stories = [tiny.Story(**entry) for entry in all_gather_objects(transport, asdict(mine))]
    for story in stories:
        story.steps = [(loss, norm) for loss, norm in story.steps]
    whole = tiny.merge(stories)
    assert whole.steps == expected.steps
    assert whole.state == expected.state


def _grid(transport: Transport) -> Iterator[tuple[str, Callable[[Transport], None]]]:
    for m, tied in ((1, True), (3, False), (8, True)):
        keys = {"sequences": 2 * m, "model__tie_embeddings": tied, **WIDE}
        expected = tiny.merge([tiny.run(tiny.config(**keys), solo())])
        for schedule, chunks in tiny.SCHEDULES:
            if tiny.takes(schedule, chunks, transport.size, m):
                config = tiny.config(schedule=schedule, chunks=chunks, **keys)

                def check(transport: Transport, config: object = config, expected: tiny.Story = expected) -> None:
                    same_story(transport, tiny.run(config, transport), expected)  # type: ignore[arg-type]

                yield f"{schedule} v={chunks} m={m} {'tied' if tied else 'untied'}", check


Checks = Callable[[Transport], Iterator[tuple[str, Callable[[Transport], None]]]]

PARTS: dict[str, Checks] = {
    "contract": lambda transport: iter(
        [
            *contract.CHECKS.items(),
            ("check_pieces", check_pieces),
            ("check_memory_by_address", check_memory_by_address),
            ("check_findings", check_findings),
            ("check_a_wait_ends_in_time", check_a_wait_ends_in_time),
        ]
    ),
    "grid": _grid,
}


def run_checks(*parts: Checks) -> int:
    """Do all checks on every rank of the launch, one after another; the exit code."""
    transport = open_world()
    transport.configure(timeout_s=60.0, wait="auto")
    failed = False
    for part in parts:
        for name, check in part(transport):
            try:
                check(transport)
                trouble = None
            except Exception:
                trouble = traceback.format_exc()
            troubles = [
                f"rank {rank}: {text}" for rank, text in enumerate(all_gather_objects(transport, trouble)) if text
            ]
            failed = failed or bool(troubles)
            if transport.rank == 0:
                print(json.dumps({"check": name, "ok": not troubles, "error": "\n".join(troubles)}), flush=True)
    transport.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_checks(*(PARTS[part] for part in sys.argv[1:] or PARTS)))
