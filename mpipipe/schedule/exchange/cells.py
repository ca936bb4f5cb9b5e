"""Rows of text to the arrays of a table and back, a cell at a time, each with its place in the file.

Letters: p = num_ranks, A = number of actions.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpipipe.errors import ScheduleError, TableFileError
from mpipipe.schedule.action import Action, Kind, overlap_text, parse_cell
from mpipipe.schedule.table import MAX_STAGES, Extra, ScheduleTable

NO_ACTIONS = ","
"""The row of a rank that does nothing: two empty cells, since an empty line is no row."""

_BLANKS = " \t"
_PLAIN = re.compile(r"[ \t]*([0-9]{1,9})([A-Z_]{1,6})([0-9]{1,9})[ \t]*")
_NUMBER_OF = {kind.name: int(kind) for kind in Kind}
_LONGEST_QUOTE = 60


class Cells(NamedTuple):
    """What the rows say. ``offsets`` int64 (p+1,); ``kinds`` uint8, ``stages`` int16, ``microbatches`` int32 (A,);
    ``overlaps`` int64 (n,): flat indices of the first actions of pairs. ``cells`` int32 (A,): in which cell of its
    line each action stands, from 1; ``lines`` int64 (p,): the line of each row, from 1."""

    offsets: NDArray[np.int64]
    kinds: NDArray[np.uint8]
    stages: NDArray[np.int16]
    microbatches: NDArray[np.int32]
    overlaps: NDArray[np.int64]
    extras: tuple[Extra, ...]
    cells: NDArray[np.int32]
    lines: NDArray[np.int64]


def read_rows(rows: Sequence[str], first_line: int, file: str) -> Cells:
    """The actions of the rows of a file, one row a rank; ``first_line`` is the line of the first, from 1.

    Empty cells are left out; they count as cells. Raises TableFileError with line and cell for one that says nothing.
    """
    parts = [_read_row(row, rank, first_line + rank, file) for rank, row in enumerate(rows)]
    sizes = np.array([len(part.kinds) for part in parts], dtype=np.int64)
    offsets = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes)))
    return Cells(
        offsets=offsets,
        kinds=_joined([part.kinds for part in parts], np.dtype(np.uint8)),
        stages=_joined([part.stages for part in parts], np.dtype(np.int16)),
        microbatches=_joined([part.microbatches for part in parts], np.dtype(np.int32)),
        overlaps=np.array(
            [start + row for start, part in zip(offsets.tolist(), parts, strict=False) for row in part.pairs],
            dtype=np.int64,
        ),
        extras=tuple(extra for part in parts for extra in part.extras),
        cells=_joined([part.cells for part in parts], np.dtype(np.int32)),
        lines=first_line + np.arange(len(rows), dtype=np.int64),
    )


class _Row(NamedTuple):
    kinds: NDArray[np.uint8]
    stages: NDArray[np.int16]
    microbatches: NDArray[np.int32]
    cells: NDArray[np.int32]
    pairs: list[int]
    extras: list[Extra]


def _joined(parts: list[Any], dtype: np.dtype[Any]) -> Any:
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)


def _read_row(row: str, rank: int, line: int, file: str) -> _Row:
    kinds: list[int] = []
    stages: list[int] = []
    microbatches: list[int] = []
    cells: list[int] = []
    pairs: list[int] = []
    extras: list[Extra] = []
    fullmatch, number_of = _PLAIN.fullmatch, _NUMBER_OF
    for cell, text in enumerate(_split(row, line, file), 1):
        match = fullmatch(text)
        if match is not None:
            stage, name, microbatch = match.groups()
            kind = number_of.get(name)
            if kind is not None:
                kinds.append(kind)
                stages.append(int(stage))
                microbatches.append(int(microbatch))
                cells.append(cell)
                continue
        text = text.strip(_BLANKS)
        if not text:
            continue
        found = _parse(text, row, line, cell, file)
        if isinstance(found, str):
            extras.append(Extra(rank, len(kinds), found))
            continue
        if len(found) == 2:
            pairs.append(len(kinds))
        for action in found:
            kinds.append(int(action.kind))
            stages.append(action.stage)
            microbatches.append(action.microbatch)
            cells.append(cell)
    if stages and max(stages) > MAX_STAGES:
        at = stages.index(max(stages))
        raise TableFileError(
            f"stage {stages[at]}: a table's stages go up to {MAX_STAGES}", file=file, line=line, cell=cells[at]
        )
    return _Row(
        np.array(kinds, dtype=np.uint8),
        np.array(stages, dtype=np.int16),
        np.array(microbatches, dtype=np.int32),
        np.array(cells, dtype=np.int32),
        pairs,
        extras,
    )


def _split(row: str, line: int, file: str) -> list[str]:
    if '"' not in row:
        return row.split(",")
    try:
        return next(csv.reader([row], strict=True))
    except csv.Error as error:
        at = row.index('"')
        raise TableFileError(
            f"a quotation mark that is not closed, or stands inside of a cell ({error}); cells need none",
            file=file,
            line=line,
            cell=1 + row.count(",", 0, at),
        ) from None


def _parse(text: str, row: str, line: int, cell: int, file: str) -> tuple[Action, ...] | str:
    strange = len(text) > _LONGEST_QUOTE or not (text.isascii() and text.isprintable())
    try:
        return parse_cell("" if strange else text)
    except ScheduleError as error:
        if text.startswith("#"):
            why = f"{quoted(text)} is no action; header lines '# key = value' stand before the first row"
        elif re.fullmatch(r"[0-9]+[A-Z_]+[0-9]*", text) and re.search(r"[0-9]{10}", text):
            why = f"{quoted(text)}: a stage or microbatch number of more than 9 digits"
        elif "," not in row and re.search(r"[;\t|]", row) and not text.startswith("("):
            why = f"{quoted(text)} is no action; the cells of a row have a comma between them, found another separator"
        elif strange:
            why = f"{quoted(text)} is no action: expected stage, kind and microbatch, as in 2F0 or 1SEND_F3"
        else:
            why = str(error)
        raise TableFileError(why, file=file, line=line, cell=cell, text=text) from None


def quoted(text: str) -> str:
    """A piece of a file for a message: in quotation marks, cut where long, nothing that a terminal would obey."""
    text = text if len(text) <= _LONGEST_QUOTE else text[: _LONGEST_QUOTE - 3] + "..."
    return "'" + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text) + "'"


def row_texts(table: ScheduleTable) -> Iterator[list[str]]:
    """The cells of each rank, extras in their places, an overlapped pair as one cell."""
    names = [kind.name for kind in Kind]
    before: dict[int, dict[int, list[str]]] = {}
    for extra in table.extras:
        before.setdefault(extra.rank, {}).setdefault(extra.row, []).append(extra.text)
    for rank in range(table.p):
        row = table.row_of(rank)
        columns = (table.stages[row].tolist(), table.kinds[row].tolist(), table.microbatches[row].tolist())
        texts = [f"{stage}{names[kind]}{microbatch}" for stage, kind, microbatch in zip(*columns, strict=True)]
        low, high = np.searchsorted(table.overlaps, (row.start, row.stop)).tolist()
        for first in (table.overlaps[low:high] - row.start).tolist():
            texts[first : first + 2] = overlap_text(texts[first], texts[first + 1]), ""
        if rank in before:
            texts = list(_with_extras(texts, before[rank]))
        yield [text for text in texts if text] if high > low else texts


def _with_extras(texts: list[str], before: dict[int, list[str]]) -> Iterator[str]:
    for row, text in enumerate(texts):
        yield from before.get(row, ())
        yield text
    for row in sorted(row for row in before if row >= len(texts)):
        yield from before[row]


def rows_text(table: ScheduleTable) -> str:
    """All rows, a line each."""
    return "".join((",".join(cells) or NO_ACTIONS) + "\n" for cells in row_texts(table))
