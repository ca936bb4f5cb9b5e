"""Tables as CSV: our own with ``# key = value`` lines first, and any without, as torch's files are.

One row a rank, one action a cell, empty cells without meaning. Letters: p = num_ranks, v = chunks_per_rank, m =
num_microbatches.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mpipipe.errors import ScheduleError, TableFileError
from mpipipe.schedule.action import Kind
from mpipipe.schedule.exchange.cells import Cells, quoted, read_rows, rows_text
from mpipipe.schedule.exchange.loaded import LoadedTable, too_large
from mpipipe.schedule.table import MAX_STAGES, ScheduleTable

FORMAT = "mpipipe-schedule"
VERSION = 1
KEYS = ("format", "version", "name", "p", "v", "m", "placement", "mirror", "lowered")
"""The keys of the header in the order in which they are written."""
_NEEDED = ("format", "version", "p", "v", "m", "placement")
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def csv_text(table: ScheduleTable) -> str:
    """The table as our CSV, header and rows. Raises ScheduleError for a name that does not go on one line."""
    if not table.name.isprintable():
        raise ScheduleError(f"the table's name {table.name!r} does not go on a line of a file: give it another name")
    values = {
        "format": FORMAT,
        "version": VERSION,
        "name": table.name,
        "p": table.p,
        "v": table.v,
        "m": table.m,
        "placement": " ".join(map(str, table.placement)),
        "mirror": None if table.mirror is None else " ".join(map(str, table.mirror)),
        "lowered": str(table.lowered).lower(),
    }
    header = "".join(f"# {key} = {value}\n" for key, value in values.items() if value is not None)
    return header + rows_text(table)


def read_csv(data: bytes, file: str) -> LoadedTable:
    """The table of a CSV file's bytes, with header or without. Raises TableFileError with line and cell."""
    lines = _lines(data, file)
    count = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    header = _Header.read(lines[:count], file) if count else None
    rows = lines[count:]
    for number, row in enumerate(rows, count + 1):
        if not row.strip(" \t"):
            raise TableFileError(
                "an empty line between rows: take it out, or write one comma for a rank that does nothing",
                file=file,
                line=number,
            )
    cells = read_rows(rows, count + 1, file)
    table = _without_header(cells, file) if header is None else _with_header(header, cells, count, file)
    return LoadedTable(table, file, cells.lines, cells.cells)


def _lines(data: bytes, file: str) -> list[str]:
    """The lines of a file, those at the end that are empty left out."""
    if data[:2] in _UTF16:
        raise TableFileError("the text is UTF-16: save it as UTF-8", file=file, line=1)
    data = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")
    for wrong, what in ((b"\0", "a NUL byte: this is no text"), (b"\r", "a carriage return amid a line")):
        if wrong in data:
            raise _at_byte(data, data.index(wrong), what, file)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"the byte 0x{data[error.start]:02x} is no UTF-8: save the file as UTF-8"
        raise _at_byte(data, error.start, what, file) from None
    lines = text.split("\n")
    while lines and not lines[-1].strip(" \t"):
        lines.pop()
    if not lines:
        raise TableFileError("the file is empty: a table has one row a rank", file=file, line=1)
    return lines


def _at_byte(data: bytes, offset: int, what: str, file: str) -> TableFileError:
    begin = data.rfind(b"\n", 0, offset) + 1
    cell = None if data[begin : begin + 1] == b"#" else 1 + data.count(b",", begin, offset)
    return TableFileError(what, file=file, line=1 + data.count(b"\n", 0, offset), cell=cell)


class _Value(NamedTuple):
    text: str
    line: int


@dataclass
class _Header:
    """The header lines of a file by key, each with its line."""

    file: str
    values: dict[str, _Value] = field(default_factory=dict)

    @classmethod
    def read(cls, lines: list[str], file: str) -> _Header:
        header = cls(file)
        for number, line in enumerate(lines, 1):
            key, equals, value = (part.strip(" \t") for part in line.removeprefix("#").partition("="))
            if not equals:
                raise TableFileError(f"{quoted(line)} is no header line '# key = value'", file=file, line=number)
            if key not in KEYS:
                near = difflib.get_close_matches(key.lower(), KEYS, n=1)
                hint = f"did you mean '{near[0]}'?" if near else f"the keys are {', '.join(KEYS)}"
                raise TableFileError(f"unknown key {quoted(key)}; {hint}", file=file, line=number)
            if key in header.values:
                before = header.values[key].line
                raise TableFileError(f"{key} stands on line {before} already", file=file, line=number)
            header.values[key] = _Value(value.rstrip(", \t"), number)
        header._check_format()
        return header

    def _check_format(self) -> None:
        for key in _NEEDED:
            if key not in self.values:
                raise TableFileError(
                    f"the header has no line '# {key} = ...'; it needs {', '.join(_NEEDED)}", file=self.file, line=1
                )
        found, line = self.values["format"]
        if found != FORMAT:
            raise TableFileError(f"format {quoted(found)} found, '{FORMAT}' is read", file=self.file, line=line)
        version = self.number("version")
        if version != VERSION:
            newer = "; a newer mpipipe wrote this file" if version > VERSION else ""
            raise self.wrong("version", f"{version} found, {VERSION} supported{newer}")

    def wrong(self, key: str, problem: str) -> TableFileError:
        return TableFileError(f"{key} = {problem}", file=self.file, line=self.values[key].line)

    def number(self, key: str) -> int:
        """A whole number of 1 or more."""
        text = self.values[key].text
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
            raise self.wrong(key, f"{quoted(text)}: a whole number, 1 or more and of at most 9 digits, is needed")
        return int(text)

    def ranks(self, key: str, p: int, num_stages: int) -> tuple[int, ...] | None:
        """The rank of each stage; None for a key that is not there."""
        if key not in self.values:
            return None
        words = self.values[key].text.split()
        for word in words:
            if not re.fullmatch(r"[0-9]{1,9}", word) or int(word) >= p:
                raise self.wrong(key, f"... {quoted(word)} ...: the ranks are 0..{p - 1}, with a space between")
        if len(words) != num_stages:
            raise self.wrong(key, f"{len(words)} ranks, one for each of the p*v = {num_stages} stages is needed")
        return tuple(map(int, words))

    def lowered(self) -> bool | None:
        if "lowered" not in self.values:
            return None
        text = self.values["lowered"].text
        if text not in ("true", "false"):
            raise self.wrong("lowered", f"{quoted(text)}: true or false is needed")
        return text == "true"


def _with_header(header: _Header, cells: Cells, count: int, file: str) -> ScheduleTable:
    p, v, m = (header.number(key) for key in ("p", "v", "m"))
    if p * v > MAX_STAGES:
        raise header.wrong("p", f"{p} times v = {v} gives {p * v} stages: a table holds at most {MAX_STAGES}")
    found = len(cells.lines)
    if found != p:
        line = count + 1 + min(p, found - 1) if found else count
        raise TableFileError(
            f"{found} rows found, the header says p = {p} (line {header.values['p'].line}): one row a rank",
            file=file,
            line=line,
        )
    placement = header.ranks("placement", p, p * v)
    mirror = header.ranks("mirror", p, p * v)
    problem = too_large(p * v, m, cells.kinds.size)
    if problem is not None:
        raise header.wrong("m", f"{m}: {problem}")
    lowered = header.lowered()
    messages = np.flatnonzero(cells.kinds > Kind.W)
    if lowered is False and messages.size:
        line = header.values["lowered"].line
        why = f"a message in a table that is not lowered (line {line}: lowered = false)"
        raise _at_action(cells, int(messages[0]), why, file)
    name = header.values["name"].text if "name" in header.values else "custom"
    assert placement is not None
    return _table(cells, name, p, v, m, placement, mirror, bool(messages.size) if lowered is None else lowered)


def _without_header(cells: Cells, file: str) -> ScheduleTable:
    """p is the number of rows; the rest is read off the actions: each stage lies on the first rank that names it."""
    p = len(cells.lines)
    if not cells.kinds.size:
        raise TableFileError("no cell of the file holds an action, as 2F0", file=file, line=int(cells.lines[0]), cell=1)
    stages, first = np.unique(cells.stages, return_index=True)
    last = int(first[-1])
    absent = np.flatnonzero(stages != np.arange(stages.size))
    if absent.size:
        raise _at_action(cells, last, f"stages go up to {stages[-1]}, but no row names stage {int(absent[0])}", file)
    v, rest = divmod(stages.size, p)
    if rest or v == 0:
        why = (
            f"{stages.size} stages do not go evenly on {p} rows, and every rank has as many stages: "
            "is a row missing, or one too many?"
        )
        raise _at_action(cells, last, why, file)
    m = 1 + int(cells.microbatches.max())
    problem = too_large(stages.size, m, cells.kinds.size)
    if problem is not None:
        raise _at_action(cells, int(cells.microbatches.argmax()), problem, file)
    placement = tuple((np.searchsorted(cells.offsets, first, side="right") - 1).tolist())
    return _table(cells, "custom", p, v, m, placement, None, bool((cells.kinds > Kind.W).any()))


def _at_action(cells: Cells, index: int, problem: str, file: str) -> TableFileError:
    rank = int(np.searchsorted(cells.offsets, index, side="right")) - 1
    kind = Kind(int(cells.kinds[index]))
    text = f"{cells.stages[index]}{kind.name}{cells.microbatches[index]}"
    return TableFileError(
        f"'{text}': {problem}", file=file, line=int(cells.lines[rank]), cell=int(cells.cells[index]), text=text
    )


def _table(
    cells: Cells,
    name: str,
    p: int,
    v: int,
    m: int,
    placement: tuple[int, ...],
    mirror: tuple[int, ...] | None,
    lowered: bool,
) -> ScheduleTable:
    return ScheduleTable(
        name=name,
        p=p,
        v=v,
        m=m,
        placement=placement,
        lowered=lowered,
        offsets=cells.offsets,
        kinds=cells.kinds,
        stages=cells.stages,
        microbatches=cells.microbatches,
        mirror=mirror,
        overlaps=cells.overlaps,
        extras=cells.extras,
    )
