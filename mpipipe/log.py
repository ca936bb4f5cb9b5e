"""What a log line carries and who writes it. No handler is attached here: that is the command line's part.

The package logs to ``logging.getLogger("mpipipe...")``. A line has time, rank, stages and step. On the console rank 0
tells everything from INFO on, the other ranks from WARNING on; a rank's file gets everything from DEBUG on.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

LOGGER = "mpipipe"
LINE = "%(asctime)s rank %(rank)s stage %(stages)s step %(step)s %(levelname)s %(name)s: %(message)s"


@dataclass
class LogContext:
    """Where a rank is in its run; the filter reads it at every line. ``stages``: the rank's stages, as ``"0,4"``."""

    rank: int = 0
    stages: str = "-"
    step: int | None = None


class ContextFilter(logging.Filter):
    """Adds ``rank``, ``stages`` and ``step`` to every record; a record's own ``step`` (by ``extra``) stays."""

    def __init__(self, context: LogContext) -> None:
        super().__init__()
        self._context = context

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = self._context.rank
        record.stages = self._context.stages
        if not hasattr(record, "step"):
            record.step = "-" if self._context.step is None else self._context.step
        return True


def console_level(rank: int) -> int:
    """INFO on rank 0, WARNING on the others."""
    return logging.INFO if rank == 0 else logging.WARNING


def line_formatter() -> logging.Formatter:
    """The format of every line, on the console and in the files."""
    return logging.Formatter(LINE)
