"""Tables in files: read by what a file holds, written whole or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mpipipe.errors import ScheduleError, TableFileError
from mpipipe.formats.whole import Parts, sync
from mpipipe.schedule.exchange.csv_file import csv_text, read_csv
from mpipipe.schedule.exchange.loaded import LoadedTable, too_large
from mpipipe.schedule.exchange.torch_csv import torch_comms_text, torch_text
from mpipipe.schedule.table import Extra, ScheduleTable, frozen

TABLE_FORMS = ("csv", "torch-csv", "torch-comms-csv", "h5")
"""The forms of ``save_table``; each is read back by ``load_table``."""

_HDF5_ENDINGS = (".h5", ".hdf5")
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_LARGEST_BYTES = 2**31
_WRITERS: dict[str, Callable[[ScheduleTable], str]] = {
    "csv": csv_text,
    "torch-csv": torch_text,
    "torch-comms-csv": torch_comms_text,
}


def load_table(path: str | Path) -> ScheduleTable:
    """The table of a file: our HDF5, our CSV, or a CSV without header lines as torch writes it.

    What the file holds decides, not its name. The table can be illegal (``find_problems`` says so); what is no table is
    refused with TableFileError, a ScheduleError, with file, line and cell.
    """
    return load_with_places(path).table


def load_with_places(path: str | Path) -> LoadedTable:
    """As ``load_table``, with the line and cell of every action."""
    path = Path(path)
    try:
        if path.is_dir():
            raise TableFileError("is a folder: give the file of a table", file=path)
        with open(path, "rb") as file:
            data = file.read(len(_HDF5_SIGNATURE))
            if data == _HDF5_SIGNATURE:
                return _load_hdf5(path)
            data += file.read(_LARGEST_BYTES)
    except ScheduleError:
        raise
    except FileNotFoundError:
        raise TableFileError("there is no such file", file=path) from None
    except (OSError, ValueError) as error:
        raise TableFileError(f"can't be read: {getattr(error, 'strerror', None) or error}", file=path) from None
    if path.suffix.lower() in _HDF5_ENDINGS:
        raise TableFileError("is no HDF5 file, or its begin is damaged", file=path)
    if len(data) > _LARGEST_BYTES:
        raise TableFileError(f"is larger than {_LARGEST_BYTES:,} bytes: take the format h5", file=path)
    if data.lstrip()[:1] in (b"{", b"["):
        raise TableFileError("is JSON: tables are read from CSV and HDF5 files", file=path, line=1)
    return read_csv(data, str(path))


def _load_hdf5(path: Path) -> LoadedTable:
    from mpipipe.formats.table import read_table

    stored = read_table(path)
    problem = too_large(stored.p * stored.v, stored.m, stored.kinds.size)
    if problem is not None:
        raise TableFileError(problem, file=path)
    for extra in stored.extras:
        if extra[0] >= stored.p:
            raise TableFileError(f"/extras/rank names rank {extra[0]}, the table has p = {stored.p}", file=path)
    fields = stored._asdict()
    for name in ("kinds", "stages", "microbatches"):
        fields[name] = frozen(fields[name])
    fields["placement"] = tuple(stored.placement.tolist())
    fields["mirror"] = None if stored.mirror is None else tuple(stored.mirror.tolist())
    fields["extras"] = tuple(Extra(*extra) for extra in stored.extras)
    try:
        return LoadedTable(ScheduleTable(**fields), str(path))
    except ScheduleError as error:
        raise TableFileError(f"the file's arrays make no table: {error}", file=path) from None


def save_table(table: ScheduleTable, path: str | Path, form: str | None = None) -> None:
    """Write a table to ``path``, under a temporary name beside it that is then renamed.

    ``form``: one of ``TABLE_FORMS``; without it, by the ending: ``.csv`` our CSV, ``.h5`` and ``.hdf5`` HDF5. A file of
    that name is replaced if it is empty or holds a table of the same kind (CSV or HDF5), and kept otherwise. Raises
    TableFileError for such a file and for one that can't be written, ScheduleError for a table that the form can't
    hold.
    """
    path = Path(path)
    chosen = form or _form_of(path)
    if chosen == "h5":
        if not table.name.isprintable():
            raise ScheduleError(f"the table's name {table.name!r} is no text for a file: give it another name")
        write_whole(path, lambda part: _write_hdf5(table, part), _holds_hdf5_table, "an HDF5 table")
    elif chosen in _WRITERS:
        text = _WRITERS[chosen](table)
        write_whole(path, lambda part: _write_text(text, part), _holds_csv_table, "a CSV table")
    else:
        raise ScheduleError(f"unknown form '{chosen}' of a table (allowed: {', '.join(TABLE_FORMS)})")


def table_text(table: ScheduleTable, form: str) -> str:
    """The text of one of the forms of ``save_table`` but h5. Raises ScheduleError for a table that it can't hold."""
    return _WRITERS[form](table)


def _form_of(path: Path) -> str:
    ending = path.suffix.lower()
    if ending in _HDF5_ENDINGS:
        return "h5"
    if ending == ".csv":
        return "csv"
    raise TableFileError(
        f"can't tell the form from the ending: take .csv or .h5, or say which of {', '.join(TABLE_FORMS)}", file=path
    )


def write_whole(path: Path, write: Callable[[Path], None], same: Callable[[Path], bool], what: str) -> None:
    """Let ``write`` make a file under a temporary name beside ``path``, flush it, rename it.

    A regular file that is there already must be empty or ``same``; anything else (a pipe, ``/dev/stdout``) is written
    to directly. Raises TableFileError; nothing is left behind.
    """
    try:
        device = path.is_absolute() and path.parts[1:2] == ("dev",)  # /dev/stdout can lead to a regular file
        path = path if device else path.resolve()
        if device or (path.exists() and not path.is_file() and not path.is_dir()):
            write(path)
            return
        if path.is_dir():
            raise TableFileError("is a folder: give the name of a file", file=path)
        if path.exists() and path.stat().st_size and not same(path):
            raise TableFileError(
                f"holds something else than {what}, and is kept: choose another name, or remove it", file=path
            )
        with Parts() as parts:
            part = parts.beside(path)
            write(part)
            sync(part, os.O_RDWR)
            parts.rename()
    except ScheduleError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise TableFileError(f"can't be written: {_why(error)}", file=path) from None


def _why(error: Exception) -> str:
    """What the system says; h5py's own texts are for those who know HDF5."""
    number = getattr(error, "errno", None)
    if number is None and (found := re.search(r"errno = ([0-9]+)", str(error))):
        number = int(found[1])
    return str(error) if number is None else os.strerror(number)


def _write_text(text: str, path: Path) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(text)


def _write_hdf5(table: ScheduleTable, path: Path) -> None:
    from mpipipe.formats.table import StoredTable, write_table

    stored = StoredTable(
        name=table.name,
        p=table.p,
        v=table.v,
        m=table.m,
        lowered=table.lowered,
        placement=np.asarray(table.placement, dtype=np.int32),
        mirror=None if table.mirror is None else np.asarray(table.mirror, dtype=np.int32),
        offsets=table.offsets,
        kinds=table.kinds,
        stages=table.stages,
        microbatches=table.microbatches,
        overlaps=table.overlaps,
        extras=tuple((extra.rank, extra.row, extra.text) for extra in table.extras),
    )
    write_table(path, stored)


def _holds_hdf5_table(path: Path) -> bool:
    from mpipipe.formats.table import holds_table

    return holds_table(path)


def _holds_csv_table(path: Path) -> bool:
    """True for a file that is read as a CSV table, or begins as ours do."""
    with open(path, "rb") as file:
        if file.read(1024).removeprefix(b"\xef\xbb\xbf").startswith(b"# format = mpipipe-schedule"):
            return True
        file.seek(0)
        head = file.read(_LARGEST_BYTES)
    try:
        read_csv(head, str(path))
    except ScheduleError:
        return False
    return True
