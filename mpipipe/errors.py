"""Every error class of the project, in one place.

A message says what was asked, what was found and what to change, in the user's own configuration keys. Several classes
inherit twice, so that ``except ValueError`` or ``except TimeoutError`` in a user's script still works.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class MpipipeError(Exception):
    """Base of every error that mpipipe raises on purpose.

    ``seen_alike`` is true when every rank comes to the same error from the same facts (a wrong run file, say): such an
    error is printed once, by one rank, and needs no abort. ``exit_code``: of a job that ends by it alike on all ranks.
    """

    seen_alike: bool = False
    exit_code: int = 1


class ConfigError(MpipipeError, ValueError):
    """A run file, a ``--set`` or a command-line value that can't be used.

    Attributes: ``file`` (the run file or ``"--set"``), ``key`` (dotted, as the user writes it), ``value``, ``allowed``
    (what would be accepted, in words or as a list), ``nearest`` (the nearest known key, for an unknown one). The text
    begins with file and key; the key is left out where ``problem`` itself begins with it.
    """

    seen_alike = True
    exit_code = 2

    def __init__(
        self,
        problem: str,
        *,
        file: str | Path | None = None,
        key: str | None = None,
        value: object = None,
        allowed: str | Sequence[str] | None = None,
        nearest: str | None = None,
    ) -> None:
        self.problem = problem
        self.file = None if file is None else str(file)
        self.key = key
        self.value = value
        self.allowed = allowed
        self.nearest = nearest
        super().__init__(self._text())

    def _text(self) -> str:
        key = None if self.key and self.problem.startswith(f"{self.key} ") else self.key
        where = ": ".join(part for part in (self.file, key) if part)
        text = f"{where}: {self.problem}" if where else self.problem
        if self.nearest:
            text += f". Did you mean '{self.nearest}'?"
        if self.allowed:
            allowed = self.allowed if isinstance(self.allowed, str) else ", ".join(self.allowed)
            text += f" (allowed: {allowed})"
        return text


class TopologyError(ConfigError):
    """The ranks that were started do not fit the ranks that the run file asks for."""


class PartitionError(ConfigError):
    """The model can't be cut as asked: more stages than layers, or a listed split that does not add up."""


class SetupError(MpipipeError, RuntimeError):
    """The machine or launcher can't run what was asked (exit code 3)."""

    seen_alike = True
    exit_code = 3


class NotCudaAwareError(SetupError):
    """``comm.path = "cuda-aware"`` was asked for and the MPI library can't take device pointers."""


class DeviceBindingError(SetupError):
    """No device for this rank, or two ranks on one device where that was excluded."""


class LauncherMismatchError(SetupError):
    """The launcher started N processes and MPI sees another number: launcher and MPI library do not belong together."""

    seen_alike = False


class MissingDependencyError(SetupError, ImportError):
    """A package that this verb needs is not installed; the message names the extra that brings it."""


class ScheduleError(MpipipeError, ValueError):
    """A schedule table that can't be built or is not legal.

    Attributes: ``rank``, ``row`` (position in that rank's list) and ``action`` (its text) of the first problem, where
    known.
    """

    seen_alike = True
    exit_code = 2

    def __init__(
        self, message: str, *, rank: int | None = None, row: int | None = None, action: str | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.row = row
        self.action = action


class ScheduleDeadlockError(ScheduleError):
    """Executing the table would stop for ever; the message holds the cycle of who waits for whom."""


class TableFileError(ScheduleError):
    """A file that holds no schedule table, or can't be written as one.

    Attributes: ``file``; ``line`` and ``cell`` of the place, counted from 1, None where it has none (a header line has
    no cells; an HDF5 file has neither). The text begins with them, as ``table.csv:3, cell 7: ...``.
    """

    def __init__(
        self,
        problem: str,
        *,
        file: str | Path,
        line: int | None = None,
        cell: int | None = None,
        text: str | None = None,
    ) -> None:
        self.problem = problem
        self.file = str(file)
        self.line = line
        self.cell = cell
        where = self.file if line is None else f"{self.file}:{line}"
        super().__init__(f"{where}{'' if cell is None else f', cell {cell}'}: {problem}", action=text)


class TransportError(MpipipeError, RuntimeError):
    """A message could not be sent or received. Attributes: ``rank``, ``peer``, ``message`` (its name, as
    ``1SEND_F3``).
    """

    def __init__(
        self, text: str, *, rank: int | None = None, peer: int | None = None, message: str | None = None
    ) -> None:
        super().__init__(text)
        self.rank = rank
        self.peer = peer
        self.message = message


class TransportTimeoutError(TransportError, TimeoutError):
    """A wait ran past ``comm.timeout_s``. ``told_by``: the other rank that reports it for all, None if this one
    does.
    """

    told_by: int | None = None


class MessageMismatchError(TransportError):
    """A message arrived with another size, shape or type than both sides had agreed."""


class EngineError(MpipipeError, RuntimeError):
    """The engine was used or fed wrongly; the message names the action and the last actions before it."""


class DataError(MpipipeError, ValueError):
    """Token data that can't be used; names file, position and value."""

    seen_alike = True
    exit_code = 2


class CheckpointError(MpipipeError):
    """Base of the checkpoint errors."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No checkpoint where one was asked for."""

    seen_alike = True
    exit_code = 2


class CheckpointIncompleteError(CheckpointError):
    """The folder has no manifest, or a file that the manifest lists is missing or has another size."""


class CheckpointCorruptError(CheckpointError):
    """A tensor's bytes do not have the checksum that the manifest gives."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """The checkpoint belongs to another model: missing, unexpected or differently shaped tensors."""

    seen_alike = True
    exit_code = 2


class TraceFormatError(MpipipeError, ValueError):
    """A trace file that can't be read; names file, group, and the version found and supported."""
