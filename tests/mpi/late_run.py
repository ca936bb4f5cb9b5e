"""Trains on late devices over MPI: messages begin when their bytes are there, memory is received into when its readers
are done, and the bits are those of one rank on the host.

``mpirun -n P python tests/mpi/late_run.py``. Rank 0 prints a JSON line a check, as ranks.py does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tiny
from fakes.late_trainer import late_devices
from ranks import WIDE, run_checks, same_story

from mpipipe.device import streams
from mpipipe.transport import Transport, solo

SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2))


def checks(transport: Transport) -> Iterator[tuple[str, Callable[[Transport], None]]]:
    streams.PART_BYTES = 4000  # messages have 6 KiB here
    keys = {"sequences": 8, "microbatch": 1, **WIDE}
    expected = tiny.merge([tiny.run(tiny.config(**keys), solo())])
    for schedule, chunks in SCHEDULES:
        for staged in (False, True):
            config = tiny.config(schedule=schedule, chunks=chunks, **keys)

            def check(transport: Transport, config: object = config, staged: bool = staged) -> None:
                with late_devices(staged):
                    mine = tiny.run(config, transport)  # type: ignore[arg-type]
                same_story(transport, mine, expected)

            yield f"{schedule} v={chunks} {'staged' if staged else 'cuda-aware'}", check


if __name__ == "__main__":
    sys.exit(run_checks(checks))
