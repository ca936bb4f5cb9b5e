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

import tiny
import torch
import transport_contract as contract

import mpipipe.transport.mpi as mpi_transport
from mpipipe.collectives import all_gather_objects
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


def check_a_wait_ends_in_time(transport: Transport) -> None:
    transport.configure(timeout_s=0.3, wait="auto")
    try:
        contract.check_a_wait_that_can_not_end(transport)
    except TransportTimeoutError as error:
        raise AssertionError("the wait's own error was expected to be caught by the check") from error
    finally:
        transport.configure(timeout_s=60.0, wait="auto")


def _grid(transport: Transport) -> Iterator[tuple[str, Callable[[Transport], None]]]:
    for m, tied in ((1, True), (3, False), (8, True)):
        keys = {"sequences": 2 * m, "model__tie_embeddings": tied, **WIDE}
        expected = tiny.merge([tiny.run(tiny.config(**keys), solo())])
        for schedule, chunks in tiny.SCHEDULES:
            if tiny.takes(schedule, chunks, transport.size, m):
                config = tiny.config(schedule=schedule, chunks=chunks, **keys)

                def check(transport: Transport, config: object = config, expected: tiny.Story = expected) -> None:
                    mine = tiny.run(config, transport)  # type: ignore[arg-type]
                    stories = [tiny.Story(**entry) for entry in all_gather_objects(transport, asdict(mine))]
                    for story in stories:
                        story.steps = [(loss, norm) for loss, norm in story.steps]
                    whole = tiny.merge(stories)
                    assert whole.steps == expected.steps
                    assert whole.state == expected.state

                yield f"{schedule} v={chunks} m={m} {'tied' if tied else 'untied'}", check


PARTS: dict[str, Callable[[Transport], Iterator[tuple[str, Callable[[Transport], None]]]]] = {
    "contract": lambda transport: iter(
        [
            *contract.CHECKS.items(),
            ("check_pieces", check_pieces),
            ("check_a_wait_ends_in_time", check_a_wait_ends_in_time),
        ]
    ),
    "grid": _grid,
}


def main(parts: list[str]) -> int:
    transport = open_world()
    transport.configure(timeout_s=60.0, wait="auto")
    failed = False
    for part in parts or list(PARTS):
        for name, check in PARTS[part](transport):
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
    sys.exit(main(sys.argv[1:]))
