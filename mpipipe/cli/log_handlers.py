"""Where log lines go: the console and, during a run, the run folder. The one place that attaches handlers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mpipipe.log import LOGGER, ContextFilter, LogContext, console_level, line_formatter


class _LateFile(logging.FileHandler):
    """Makes its folder and file at the first line; keeps silent where it can't: the run itself says so."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """A log that can't be written must not hide what it was to tell: the console has it too."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def logging_to(context: LogContext, file: Path | None = None) -> Iterator[None]:
    """Within the block: log lines to standard error by the rank's level, and all of them to ``file`` (made at its first
    line)."""
    logger = logging.getLogger(LOGGER)
    console = logging.StreamHandler(sys.stderr)
    console.setLevel(console_level(context.rank))
    handlers: list[logging.Handler] = [console]
    if file is not None:
        to_file = _LateFile(file, encoding="utf-8", delay=True)
        to_file.setLevel(logging.DEBUG)
        handlers.append(to_file)
    for handler in handlers:
        handler.addFilter(ContextFilter(context))
        handler.setFormatter(line_formatter())
        logger.addHandler(handler)
    before = (logger.level, logger.propagate)
    logger.setLevel(logging.DEBUG if file is not None else logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.level, logger.propagate = before
        logger.setLevel(before[0])
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
