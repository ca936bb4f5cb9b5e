"""``mpipipe train RUN_FILE`` with a fault of one kind in one phase on one rank, with a thread of that rank living on.

``mpirun -n P python tests/mpi/faulty_run.py KIND PHASE RANK RUN_FILE MARKER``. MARKER only marks the processes in the
process table.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import mpipipe.cli.train
import mpipipe.formats.checkpoint
import mpipipe.trainer.build
import mpipipe.trainer.run
from mpipipe.cli import main
from mpipipe.environment import launcher
from mpipipe.trace import Recorder
from mpipipe.trainer import Trainer
from mpipipe.transport.mpi import MpiTransport

KIND, PHASE, RANK, RUN_FILE = sys.argv[1:5]


class TheFaultError(Exception):
    pass


def fault() -> None:
    threading.Thread(target=time.sleep, args=(600,)).start()
    if KIND == "exception":
        raise TheFaultError(f"asked for at: {PHASE}")
    if KIND == "exit":
        sys.exit(3)
    os.kill(os.getpid(), {"interrupt": signal.SIGINT, "kill": signal.SIGKILL}[KIND])
    time.sleep(60)


def before(owner: Any, name: str, condition: Callable[[], bool] = lambda: True) -> None:
    """Let the fault come where ``owner.name`` is called."""
    original = getattr(owner, name)

    def faulty(*arguments: Any, **named: Any) -> Any:
        if condition():
            fault()
        return original(*arguments, **named)

    setattr(owner, name, faulty)


def within(name: str) -> None:
    """Let the fault come in the forward of a layer, in the second call of this method of the trainer."""
    original = getattr(Trainer, name)
    calls = []

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(name)
        if len(calls) == 2:
            torch.nn.modules.module.register_module_forward_pre_hook(lambda module, inputs: fault())
        return original(*arguments, **named)

    setattr(Trainer, name, counted)


def prepare() -> None:
    if PHASE == "config":
        before(mpipipe.cli.train, "prepare_config")
    elif PHASE == "data":
        before(mpipipe.trainer.run, "_batch")
    elif PHASE == "source":
        before(mpipipe.trainer.run, "_source")
    elif PHASE == "build":
        before(mpipipe.trainer.build, "_make")
    elif PHASE == "step":
        within("step_report")
    elif PHASE == "evaluation":
        within("evaluate")
    elif PHASE == "save":
        before(mpipipe.formats.checkpoint, "write_shard")
    elif PHASE == "exit":
        before(Recorder, "close")
    elif PHASE == "close":
        before(MpiTransport, "close")
    else:
        raise ValueError(PHASE)


if launcher().rank == int(RANK):
    prepare()
sys.argv[1:] = ["train", RUN_FILE]
sys.exit(main())
