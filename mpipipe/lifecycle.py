"""What the outside world can see of a run: ``status.json``, and when its time is up."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from mpipipe.formats.whole import replace_text
from mpipipe.transport import Transport
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


class PlaceSignal:
    """While it is open, SIGUSR2 makes this process say on standard error where its rank is and what it waits for.

    Only the main thread can take signals: made in another one, it does nothing. A handler that was there before is
    called too, and is put back by ``close``. Holds the transport weakly: without ``close`` it falls silent with it.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport: Callable[[], Transport | None] = weakref.ref(transport)
        self._before: Any = None
        self._installed = False
        if threading.current_thread() is not threading.main_thread():
            return
        before: Any = _still_open(signal.getsignal(signal.SIGUSR2))
        if before is None:  # of a library that is not Python: it can't be put back
            return
        self._before = before
        signal.signal(signal.SIGUSR2, self)
        signal.siginterrupt(signal.SIGUSR2, False)  # system calls of libraries go on
        self._installed = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        transport = self._transport() if self._installed else None
        if transport is not None:
            line = f"mpipipe: {transport.standing().line()}\n".encode()
            with suppress(OSError):  # not by sys.stderr: it may be in the middle of a line
                os.write(2, line)
        if callable(self._before):
            self._before(number, frame)

    @property
    def is_open(self) -> bool:
        return self._installed and self._transport() is not None

    @property
    def before(self) -> Any:
        """The handler that was there before."""
        return self._before

    def close(self) -> None:
        """Put the earlier handler back, unless another one has come since; a second call does nothing."""
        if self._installed and threading.current_thread() is threading.main_thread():
            self._installed = False
            current: Any = signal.getsignal(signal.SIGUSR2)
            if current is self:
                signal.signal(signal.SIGUSR2, _still_open(self._before))


def _still_open(handler: Any) -> Any:
    """``handler``, or the one that was there before it, if it is one of ours that is closed."""
    while isinstance(handler, PlaceSignal) and not handler.is_open:
        handler = handler.before
    return handler


def this_process() -> str:
    """Who holds a lock, in its words."""
    return f"host {socket.gethostname()}, process {os.getpid()}"


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
            os.pwrite(descriptor, f"{this_process()}\n".encode(), 0)
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
