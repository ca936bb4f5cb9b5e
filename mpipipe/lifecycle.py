"""What the outside world can see of a run: ``status.json``, and when its time is up."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import Literal

from mpipipe.formats.whole import replace_text
from mpipipe.units import finite_or_none

_log = logging.getLogger(__name__)

State = Literal["running", "done", "stopped", "failed"]

_TIME_LIMIT_MARGIN = 1.5


def write_status(path: Path, state: State, *, exit_code: int | None, **fields: object) -> None:
    """Replace ``status.json`` as a whole: a reader never sees half of it.

    ``exit_code``: what the job's processes exit with, None while it runs. Launchers change exit codes; this file does
    not.
    """
    given = {key: finite_or_none(value) for key, value in fields.items()}
    status = {"state": state, "exit_code": exit_code, **given, "host": socket.gethostname(), "time": time.time()}
    replace_text(path, json.dumps(status, indent=1, allow_nan=False) + "\n")


class TimeLimit:
    """Says when a run must save and stop to be done before ``run.time_limit``.

    It leaves room for one and a half times the longest step, evaluation and save so far. The clock starts with the
    object.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._start = time.monotonic()
        self._longest_step_s = 0.0
        self._longest_evaluation_s = 0.0
        self._longest_save_s = 0.0

    def note_step(self, seconds: float) -> None:
        self._longest_step_s = max(self._longest_step_s, seconds)

    def note_evaluation(self, seconds: float) -> None:
        self._longest_evaluation_s = max(self._longest_evaluation_s, seconds)

    def note_save(self, seconds: float) -> None:
        self._longest_save_s = max(self._longest_save_s, seconds)

    @property
    def reached(self) -> bool:
        if self._limit_s is None:
            return False
        room = _TIME_LIMIT_MARGIN * (self._longest_step_s + self._longest_evaluation_s + self._longest_save_s)
        return time.monotonic() - self._start + room >= self._limit_s


class RunLock:
    """Keeps two launches out of one run folder, by a lock that ends with the process that holds it.

    Some cluster file systems have no locks: there it does nothing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> str | None:
        """Take the lock, making the folder; None on success (also where there are no locks), else who holds it.

        Holding it already is success. Raises ``OSError`` where the file can't be made.
        """
        if self._descriptor is not None:
            return None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return holder or "it does not say who"
            _log.debug("%s: no locks on this file system: %s", self._path, error)
            return None
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"host {socket.gethostname()}, process {os.getpid()}\n".encode(), 0)
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return None

    def release(self) -> None:
        """Give the lock up; nothing if it is not held. The file stays."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
