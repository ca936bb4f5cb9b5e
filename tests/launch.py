"""Starts MPI ranks from a test, with the launcher that belongs to this environment, and never waits for ever."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def mpirun() -> list[str]:
    """The launcher beside this Python, or the one on the PATH; with what Open MPI needs as root and on few cores."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    assert found, "no mpirun beside this Python and none on the PATH: pip install 'mpipipe[mpi]'"
    version = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    return [found, "--oversubscribe", "--bind-to", "none"] if "Open MPI" in version else [found]


@dataclass(frozen=True)
class Launch:
    """How a launch ended."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float


def launch(num_ranks: int, *arguments: str | Path, timeout: float = 240, cwd: Path | None = None, **env: str) -> Launch:
    """``mpirun -n num_ranks python ARGUMENTS``. A launch past ``timeout`` seconds is killed and fails the test."""
    import time

    settings = {
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,sm",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    command = [*mpirun(), "-n", str(num_ranks), sys.executable, *map(str, arguments)]
    start = time.monotonic()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env={**os.environ, **settings, **env},
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return Launch(done.returncode, done.stdout, done.stderr, time.monotonic() - start)
