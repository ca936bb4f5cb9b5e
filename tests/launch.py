"""Starts MPI ranks from a test, with the launcher that belongs to this environment, and never waits for ever."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm",
}
"""What Open MPI needs to start as root, and the one transport that ranks of a single machine use: without naming it the
start takes a second longer (docs/troubleshooting.md). Other libraries do not read these.
"""


@functools.cache
def mpirun() -> tuple[str, ...]:
    """The launcher beside this Python, or the one on the PATH; with what Open MPI needs to start more ranks than cores
    and to leave the cores to all of them.
    """
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    assert found, "no mpirun beside this Python and none on the PATH: pip install 'mpipipe[mpi]'"
    said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60, check=True)
    return (found, "--oversubscribe", "--bind-to", "none") if "Open MPI" in said.stdout else (found,)


@dataclass(frozen=True)
class Launch:
    """How a launch ended."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float


def launch(num_ranks: int, *arguments: str | Path, timeout: float = 240, cwd: Path | None = None, **env: str) -> Launch:
    """``mpirun -n num_ranks python ARGUMENTS``. A launch past ``timeout`` seconds is ended and fails the test."""
    settings = {
        **OPEN_MPI,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    command = [*mpirun(), "-n", str(num_ranks), sys.executable, *map(str, arguments)]
    start = time.monotonic()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, **settings, **env},
        stdin=subprocess.DEVNULL,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException as error:
            stdout, stderr = _end(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            late = f"{' '.join(command)} did not end within {timeout} s"
            raise AssertionError(f"{late}\n--- stdout\n{stdout}\n--- stderr\n{stderr}") from None
    return Launch(process.returncode, stdout, stderr, time.monotonic() - start)


SOON_S = 30.0
"""A job in which one rank has a fault has ended by then."""


def launch_marked(num_ranks: int, *arguments: str | Path) -> Launch:
    """A launch that is to end soon and to leave nothing: within SOON_S, and with no process two seconds after its end.
    MARKER in the arguments becomes a word of its own, by which the processes are found.
    """
    marker = f"marker-{uuid.uuid4().hex}"
    assert any("MARKER" in str(argument) for argument in arguments)
    marked = [str(argument).replace("MARKER", marker) for argument in arguments]
    ended = launch(num_ranks, *marked, timeout=SOON_S + 60)
    deadline = time.monotonic() + 2.0
    while (left := _processes_with(marker)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, left
    assert ended.seconds < SOON_S
    return ended


def _processes_with(marker: str) -> list[str]:
    """The command lines that hold a word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if marker in words:
            found.append(words)
    return found


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it said. By a signal that the launcher passes on: Open MPI's ranks outlive a launcher that is killed."""
    process.terminate()
    try:
        return process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
    try:
        return process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        return "", "(its ranks live on)"
