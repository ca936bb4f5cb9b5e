"""Runs on every rank of an MPI launch, and proves from rank 0 in launches of its own, as a training does.

``mpirun -n P python tests/mpi/proving.py failures MARKER``: rank 0 prints a JSON line for each device that can't be
proved: its name, whether it was proved, what was seen, and the seconds.
``... proving.py path MARKER``: the path for ``auto`` is decided, then all ranks exchange the pattern in this launch,
right and wrong.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

from proof_devices import Wrong

from mpipipe.collectives import agree, on_first_rank
from mpipipe.config import Config
from mpipipe.device import HostDevice
from mpipipe.errors import NotCudaAwareError
from mpipipe.transport import Transport, open_world
from mpipipe.transport.proof import exchange_pattern, prove

STUCK_S = 4.0


def failures(transport: Transport, marker: str) -> None:
    def prove_all() -> list[list[object]]:
        found: list[list[object]] = []
        for name in ("Wrong", "Crashing", f"stuck_{marker}"):
            limit_s = STUCK_S if name.startswith("stuck") else 60.0
            begun = time.monotonic()
            proof = prove(f"proof_devices:{name}", library=transport.library, timeout_s=limit_s)
            found.append([name, proof.holds, proof.text, time.monotonic() - begun])
        return found

    for line in on_first_rank(transport, prove_all):
        say(transport.rank, *line)


def path(transport: Transport, marker: str) -> None:
    from mpipipe.trainer.path import decide_path, prove_here

    comm = Config.from_tables({"comm": {"timeout_s": 5.0}}).comm
    for override in ("0", "1"):
        os.environ["MPIPIPE_CUDA_AWARE"] = override
        found = decide_path(transport, comm, "proof_devices:ByAddress")
        say(transport.rank, found.name, found.reason)
    prove_here(transport, HostDevice(), comm)
    transport.configure(timeout_s=60.0, wait="auto")
    try:
        agree(transport, lambda: exchange_pattern(transport, Wrong() if transport.rank == 1 else HostDevice()))
    except NotCudaAwareError as error:
        say(transport.rank, "wrong", str(error))


def say(rank: int, *line: object) -> None:
    if rank == 0:
        print(json.dumps(line), flush=True)


def main(part: str, marker: str) -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
    transport = open_world()
    transport.configure(timeout_s=200.0, wait="auto")
    {"failures": failures, "path": path}[part](transport, marker)
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
