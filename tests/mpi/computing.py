"""How long a message is on its way while its sender computes: without a call of MPI, and with polls.

``mpirun -n 2 python tests/mpi/computing.py BYTES SECONDS``. Rank 0 sends and computes for so long, rank 1 waits; three
times each, in turn. Rank 1 prints one JSON line: {"plain": [seconds, ...], "polled": [seconds, ...]}.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from mpipipe import collectives
from mpipipe.transport import Transport, open_world

EVERY_S = 2e-3
"""A poll comes so often."""


def exchange(transport: Transport, nbytes: int, computes_s: float, polls: bool, tag: int) -> float:
    """Seconds from the meeting of both ranks until rank 1 has the message; on rank 0, until it is done."""
    collectives.barrier(transport)
    start = time.monotonic()
    if transport.rank == 0:
        send = transport.isend(np.full(nbytes, tag, dtype=np.uint8), 1, tag)
        while time.monotonic() - start < computes_s:
            time.sleep(EVERY_S)  # stands for a computation: the core is left to others, MPI is not called
            if polls:
                transport.poll()
        transport.wait(send, "rank 1 to take the message")
    else:
        arrived = np.zeros(nbytes, dtype=np.uint8)
        transport.wait(transport.irecv(arrived, 0, tag), "the message")
        assert (arrived == tag).all()
    return time.monotonic() - start


def main(nbytes: int, computes_s: float) -> None:
    transport = open_world()
    transport.configure(timeout_s=60.0, wait="nap")
    exchange(transport, nbytes, 0.0, False, 9)  # the first message also connects the ranks
    found = {
        way: [exchange(transport, nbytes, computes_s, way == "polled", turn) for turn in range(3)]
        for way in ("plain", "polled")
    }
    if transport.rank == 1:
        print(json.dumps(found), flush=True)
    transport.close()


main(int(sys.argv[1]), float(sys.argv[2]))
