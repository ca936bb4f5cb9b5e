"""What every check of ``device_check.py`` has: a file for its answers, its settings, launches that end.

A check is a process of its own, ``python tools/device_check_X.py CHECK SETTINGS ANSWERS``: SETTINGS is JSON, ANSWERS a
file that it appends to, one line of JSON a result, as soon as it knows one. What it had answered counts also where it
crashes or does not end.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LAUNCH_MARK = "MPIPIPE_DEVICE_CHECK_LAUNCH"
ENDS_WITHIN_S = 4.0

Settings = dict[str, Any]
"""``device``: "cuda" or "cpu"; ``small``; ``limit_s`` of the check; ``ends``: time.time() by which it is to be done;
``launcher``: command line that starts MPI ranks, or None; ``ucx``: folder of a UCX with CUDA, or None.
"""


class Answers:
    """The file of one check's answers."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def row(self, case: str, level: str, text: str, **figures: Any) -> None:
        """One result. ``level``: "ok"; "wrong"; "missed", measured and short of the goal; "absent", can't be tried
        here. ``text``: a sentence without a full stop.
        """
        self._write({"case": case, "level": level, "text": text, "figures": figures})
        print(f"{case}: {level}: {text}", flush=True)

    def setting(self, **found: Any) -> None:
        """Settings for the checks that come after this one."""
        self._write({"settings": found})

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def left_s(settings: Settings) -> float:
    """Seconds until this check is to be done."""
    return float(settings["ends"]) - time.time()


def missing(error: BaseException) -> bool:
    """Whether an error says that something is not there, rather than that something is wrong."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"ModuleNotFoundError", "MissingDependencyError", "DeviceBindingError"})


def answer(checks: Mapping[str, Callable[[Settings, Answers], None]]) -> None:
    """Do the check that the command line names."""
    name, settings, path = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    answers = Answers(path)
    try:
        gone = without_gpu() if settings["device"] == "cuda" and name != "there" else ""
        if gone:
            answers.row(name, "absent", gone)
        else:
            checks[name](settings, answers)
    except Exception as error:
        traceback.print_exc()
        level = "absent" if missing(error) else "wrong"
        answers.row(name, level, error_text(error))


def error_text(error: BaseException) -> str:
    """Class and message in one line, and what was noted."""
    notes = " | ".join(getattr(error, "__notes__", ()))
    text = " ".join(f"{type(error).__name__}: {error} {notes}".split())
    return text[:500]


def without_gpu() -> str:
    """Why no GPU can be used here; empty if one can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if torch.version.cuda is None:
        return f"needs a GPU: torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return "needs a GPU: torch finds none"
    return "" if importlib.util.find_spec("cupy") else "CuPy is not installed"


# --- launches ---


@dataclass(frozen=True)
class Ended:
    """How a launch ended: ``code`` None where it did not end in time."""

    code: int | None
    output: str
    seconds: float

    def trouble(self) -> str:
        """Empty where the exit code is 0."""
        if self.code == 0:
            return ""
        how = f"no end within {self.seconds:.0f} s" if self.code is None else f"exit code {self.code}"
        return f"{how}; last words: {last_words(self.output)}"


def last_words(output: str, lines: int = 3) -> str:
    """The last lines that say something, in one."""
    said = [line.strip() for line in output.splitlines() if line.strip(" =|-*")]
    return " / ".join(said[-lines:])[-400:] or "none"


def processes_of(variable: str, value: str) -> list[int]:
    """Processes whose environment has ``variable=value`` since their start; never this one."""
    wanted, found = f"{variable}={value}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def end_all(variable: str, value: str) -> int:
    """End by force what is left of the processes of a launch, ranks in sessions of their own too; how many."""
    left = processes_of(variable, value)
    for process in left:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)
    return len(left)


def rank_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, and what Open MPI needs on one machine. Other libraries do not read that."""
    found = dict(os.environ) | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONUNBUFFERED": "1"}
    if os.geteuid() == 0:
        found |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return found | dict(more or {})


def run(command: Sequence[str], timeout_s: float, more: Mapping[str, str] | None = None) -> Ended:
    """Start a command and wait for its end, or end it and all that it started."""
    mark, begun = uuid.uuid4().hex, time.monotonic()
    environment = rank_environment(more) | {LAUNCH_MARK: mark}
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return Ended(127, f"{command[0]} does not start: {error}", 0.0)
    code: int | None = None
    try:
        output, _ = process.communicate(timeout=max(timeout_s, 0.1))
        code = process.returncode
    except subprocess.TimeoutExpired:
        process.terminate()
        output = ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            output, _ = process.communicate(timeout=ENDS_WITHIN_S)
        end_all(LAUNCH_MARK, mark)
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            output, _ = process.communicate(timeout=ENDS_WITHIN_S)
    end_all(LAUNCH_MARK, mark)
    return Ended(code, output, time.monotonic() - begun)


def launch(
    settings: Settings,
    num_ranks: int,
    arguments: Sequence[str | Path],
    timeout_s: float,
    more: Mapping[str, str] | None = None,
) -> Ended:
    """``python ARGUMENTS`` on MPI ranks that all see the same GPU."""
    command = [*settings["launcher"], "-n", str(num_ranks), sys.executable, *map(str, arguments)]
    return run(command, timeout_s, more)
