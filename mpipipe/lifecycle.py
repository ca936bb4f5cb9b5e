"""What the outside world can see of a run: ``status.json``, and when its time is up."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Literal

State = Literal["running", "done", "stopped", "failed"]

_TIME_LIMIT_MARGIN = 1.5


def write_status(path: Path, state: State, *, exit_code: int | None, **fields: object) -> None:
    """Replace ``status.json`` as a whole: a reader never sees half of it.

    ``exit_code``: what the job's processes exit with, None while it runs. Launchers change exit codes; this file does
    not.
    """
    status = {"state": state, "exit_code": exit_code, **fields, "host": socket.gethostname(), "time": time.time()}
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(status, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


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
