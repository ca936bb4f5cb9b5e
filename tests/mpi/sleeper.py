"""A user's script that trains over MPI with ``comm.timeout_s = 2``, in which one rank does not come on.

``mpirun -n P python tests/mpi/sleeper.py HOW RANK FOLDER MARKER``. HOW: ``sleep`` in a layer of RANK for ever;
``slow``: each layer of RANK takes 1.1 s; ``miss`` a step on RANK, which waits for something else; ``signal`` RANK often
and train to the end, with RANK printing the losses; ``quiet`` the same without signals. MARKER only marks the processes
in the process table.
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
from torch import nn

from mpipipe import collectives
from mpipipe.trainer import Trainer

HOW, RANK, FOLDER = sys.argv[1], int(sys.argv[2]), sys.argv[3]
GUILTY = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "-1"))) == RANK
SIGNALS = 40


class Layer(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if HOW == "sleep" and GUILTY and self.calls == 10:
            time.sleep(600)
        if HOW == "slow" and GUILTY and self.calls > 10:
            time.sleep(1.1)
        if HOW in ("signal", "quiet") and self.calls % 8 == 1:
            time.sleep(0.05)  # the others wait
        return super().forward(x)


def signals() -> None:
    for _ in range(SIGNALS):
        time.sleep(0.03)
        os.kill(os.getpid(), signal.SIGUSR2)


def main() -> None:
    mine: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: mine.append(number))
    thread = threading.Thread(target=signals)
    world = 3
    config = little.config(
        sequences=8, comm__timeout_s=2.0, run_dir=FOLDER, trace__enabled=HOW in ("sleep", "miss"), run__steps=6
    )
    layers = [lambda: Layer(little.WIDTH, little.WIDTH)] * (2 * world)
    with Trainer(config, layers, little.square_loss) as trainer:
        if HOW == "signal" and GUILTY:
            thread.start()
        losses = []
        for step in range(6):
            if HOW == "miss" and GUILTY and step == 3:
                collectives.barrier(trainer.transport)
            losses.append(trainer.step(little.batch(step, 8)))
        if GUILTY:
            sys.stdout.write(f"losses {[loss.hex() for loss in losses]}\n")
    if GUILTY and HOW == "signal":
        thread.join()
        before = len(mine)
        os.kill(os.getpid(), signal.SIGUSR2)
        sys.stdout.write(f"own handler {before} then {len(mine)}\n")


main()
