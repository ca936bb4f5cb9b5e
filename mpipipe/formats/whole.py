"""Files that are replaced as a whole: a reader finds the old content or the new one, whatever happens in between."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType

from mpipipe.formats.paths import PART_SUFFIX


class Parts:
    """Files written under other names, until :meth:`rename` gives each its own. What is left at the end of the ``with``
    block is removed.
    """

    def __init__(self) -> None:
        self._pending: dict[Path, Path] = {}

    def beside(self, path: Path) -> Path:
        """The name, in the same folder, to write what is to become ``path`` under."""
        part = self._pending[path] = path.with_name(f"{path.name}{PART_SUFFIX}-{os.getpid()}")
        return part

    def rename(self) -> None:
        """Replace all files, one after another. Raises OSError."""
        for path, part in list(self._pending.items()):
            os.replace(part, path)
            del self._pending[path]

    def __enter__(self) -> Parts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for part in self._pending.values():
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8 beside ``path`` and rename it. Raises OSError, and then leaves nothing behind."""
    with Parts() as parts:
        parts.beside(path).write_text(text, encoding="utf-8")
        parts.rename()


def sync(path: str | Path, flags: int = os.O_RDONLY) -> None:
    """Flush a file's content, or a folder's entries (names, renames), to the disk itself."""
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
