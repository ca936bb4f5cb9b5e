"""A user's script that trains over MPI and has a fault on one rank.

``mpirun -n P python tests/mpi/faulty.py FAULT RANK MARKER``. MARKER only marks the processes in the process table.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import little
import torch
from mpi4py import MPI  # as a user's script may, before mpipipe does
from torch import nn

from mpipipe.trainer import Trainer

FAULT, RANK = sys.argv[1], int(sys.argv[2])
GUILTY = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "-1"))) == RANK


class TheFaultError(Exception):
    pass


def fail(place: str) -> None:
    if GUILTY and place == FAULT:
        raise TheFaultError(f"asked for at: {place}")


def layer() -> nn.Module:
    fail("build")
    return nn.Linear(little.WIDTH, little.WIDTH)


def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    fail("loss")
    return little.square_loss(output, target)


def at_step_two() -> None:
    fail("step")
    if GUILTY and FAULT == "thread":
        threading.Thread(target=time.sleep, args=(600,)).start()
        raise TheFaultError("asked for with a thread that lives on")
    if GUILTY and FAULT == "exit":
        sys.exit(3)
    if GUILTY and FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    world = MPI.COMM_WORLD.Get_size()
    with Trainer(little.config(sequences=8), [layer] * (2 * world), loss) as trainer:
        for step in range(1000):
            if step == 2:
                at_step_two()
            rows = 6 if GUILTY and FAULT == "rows" and step == 2 else 8
            trainer.step(little.batch(step, rows))
            if FAULT == "batches":
                trainer.evaluate([little.batch(90 + number, 8) for number in range(3 if GUILTY and step == 2 else 2)])


main()
