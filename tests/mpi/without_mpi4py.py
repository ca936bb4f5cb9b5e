"""A launch in which MPI can't be started on some ranks: ``without_mpi4py.py HOW RANKS VERB [RUN_FILE] MARKER``.

HOW: ``missing`` (no mpi4py), ``library`` (its library can't be loaded), ``late`` (an error after ``MPI_Init``). VERB:
``train``, ``doctor``, or ``script`` for a user's own script. MARKER only marks the processes in the process table.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import little

from mpipipe.cli import main
from mpipipe.environment import launcher
from mpipipe.transport import mpi

HOW, RANKS, *WORDS = sys.argv[1:-1]


class NoLibrary(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "mpi4py.MPI":
            raise OSError("libmpi.so.12: cannot open shared object file")


def fail(self: object, started: object) -> NoReturn:
    raise RuntimeError("asked for after MPI_Init")


def script() -> None:
    from mpipipe.trainer import Trainer

    with Trainer(little.config(sequences=4), [little.linear()] * 3, little.square_loss) as trainer:
        for step in range(100_000):
            trainer.step(little.batch(step, 4))


if str(launcher().rank) in RANKS.split(","):
    if HOW == "missing":
        sys.modules["mpi4py"] = None  # type: ignore[assignment]
    elif HOW == "library":
        sys.meta_path.insert(0, NoLibrary())
    elif HOW == "late":
        mpi.MpiTransport.__init__ = fail  # type: ignore[assignment, method-assign]
    else:
        raise ValueError(HOW)
if WORDS == ["script"]:
    script()
else:
    sys.argv[1:] = WORDS
    sys.exit(main())
