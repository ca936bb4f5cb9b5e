"""A table as text: a line a rank, time from left to right. Letters: p = num_ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpipipe.errors import ScheduleError
from mpipipe.schedule.action import Kind
from mpipipe.schedule.draw.colours import STYLES
from mpipipe.schedule.phases import Phase, action_phases
from mpipipe.schedule.simulate import Simulation, simulate
from mpipipe.schedule.table import ScheduleTable

_MOST_RANKS = 64
_MOST_COLUMNS = 2000
_DRAWN_UP_TO = 20_000
_FARTHEST = 2.0**53


class _Part(NamedTuple):
    """A piece of a line; ``style``: the numbers of its terminal colour, empty for none."""

    text: str
    style: str = ""


_COLOURS = {Kind.F: "36", Kind.B: "35", Kind.I: "33", Kind.W: "32"}
_LOOKS = {Phase.WARMUP: "", Phase.STEADY: ";7", Phase.COOLDOWN: ";4"}
_WAITING = "2"


def draw_text(table: ScheduleTable, simulation: Simulation | None = None, *, colour: bool = False) -> str:
    """The table on a time axis: ``F0`` is a forward of microbatch 0, ``B0---`` a backward, ``.`` a unit of waiting.

    Without ``simulation`` the costs are F = I = W = 1. One column is the largest time that divides all starts and
    ends; where the times are not whole numbers, starts are rounded to the shortest action. With more stages than ranks
    a cell begins with the stage: ``2F0``. ``F3&B1--`` is a pair that runs at once. Lines end after 2000 characters and
    64 ranks, with a note.

    With ``colour`` the kinds have terminal (ANSI) colours and the phases looks: warm-up plain, steady on a coloured
    ground, cool-down underlined; a line that explains them follows. Without the colours the text is the same.

    Raises ScheduleError for a table that is not legal.
    """
    simulation = simulate(table) if simulation is None else simulation
    table = simulation.table
    unit = _unit(simulation)
    ranks = range(min(table.p, _MOST_RANKS))
    cells = [_cells(table, simulation, rank, unit) for rank in ranks]
    widths = (math.ceil((len(cell.text) + 1) / cell.units) for row in cells for cell in row if cell.units)
    width = max(widths, default=1)
    most = _MOST_COLUMNS // width + 3
    columns = min(simulation.makespan / unit, most)
    phases = action_phases(table) if colour else None
    lines = []
    for rank, row in zip(ranks, cells, strict=True):
        parts, at = [], 0
        for cell in row:
            if at >= most:
                break
            column = min(cell.column, most)
            parts.append(_Part(".".ljust(width) * (column - at), _WAITING))
            cell = cell._replace(units=min(cell.units, most))
            parts += _cell(cell, width, table, phases)
            at = max(at, column + cell.units)
        parts.append(_Part(".".ljust(width) * (round(columns) - at), _WAITING))
        lines.append(_label(rank, table.p) + _joined(parts, colour))
    return "\n".join(lines + _more(table.p) + (_key(table) if colour else []))


class _Placed(NamedTuple):
    """An action, or a pair, on the grid: its text, flat place, first column and number of columns."""

    text: str
    place: int
    column: int
    units: int


def _cell(cell: _Placed, width: int, table: ScheduleTable, phases: NDArray[np.uint8] | None) -> list[_Part]:
    """Text of one action over its columns: dashes to its end where it is longer than one."""
    if not cell.units:
        return []
    text = cell.text if cell.units == 1 else cell.text.ljust(cell.units * width - 1, "-")
    blank = _Part(" " * (cell.units * width - len(text)))
    if phases is None:
        return [_Part(text), blank]
    look = _LOOKS[Phase(int(phases[cell.place]))]
    first, _, rest = text.partition("&")
    parts = [_Part(first, _COLOURS[Kind(int(table.kinds[cell.place]))] + look)]
    if rest:
        parts.append(_Part(f"&{rest}", _COLOURS[Kind(int(table.kinds[cell.place + 1]))] + look))
    return [*parts, blank]


def _joined(parts: Sequence[_Part], colour: bool) -> str:
    """The parts as a line of at most 2000 characters on the screen, without blanks at its end."""
    if not colour:
        return _cut("".join(part.text for part in parts))
    left = len(_cut("".join(part.text for part in parts)))
    cut = left == _MOST_COLUMNS
    left -= 4 if cut else 0
    done = []
    for part in parts:
        text = part.text[:left]
        left -= len(text)
        done.append(f"\x1b[{part.style}m{text}\x1b[0m" if part.style and text.strip() else text)
    return "".join(done) + (" ..." if cut else "")


def _key(table: ScheduleTable) -> list[str]:
    """What the colours and looks mean, a line."""
    kinds = [
        f"\x1b[{number}m{kind.name} {STYLES[kind].name}\x1b[0m"
        for kind, number in _COLOURS.items()
        if np.any(table.kinds == kind)
    ]
    phases = [f"\x1b[{('0' + look)}m{phase.title}\x1b[0m" for phase, look in _LOOKS.items()]
    return ["  ".join([*kinds, *phases])]


def table_text(table: ScheduleTable) -> str:
    """What ``str(table)`` gives: ``draw_text`` for a legal compute-only table that is not too large, else the rows in
    order."""
    if not table.lowered and table.num_actions <= _DRAWN_UP_TO:
        try:
            return draw_text(table)
        except ScheduleError:
            return marked_text(table)
    return marked_text(table)


def marked_text(table: ScheduleTable, rank: int | None = None, row: int | None = None) -> str:
    """The rows in order, without times, with the action at ``rank`` and ``row`` in square brackets.

    At most 16 rows and 9 ranks around the place are shown where there is one and the table is larger.
    """
    ranks = list(range(table.p))
    longest = int(np.diff(table.offsets).max(initial=0))
    first, last = 0, longest
    if rank is not None:
        if table.p > 9:
            ranks = ranks[max(0, rank - 4) : rank + 5]
        if longest > 16:
            first = max(0, (row or 0) - 7)
            last = first + 16
    else:
        ranks = ranks[:_MOST_RANKS]
        last = min(last, _MOST_COLUMNS)
    texts = {}
    for one in ranks:
        cells = _row_texts(table, one, first, last)
        if one == rank and row is not None:
            cells[row - first] = f"[{cells[row - first]}]"
        texts[one] = cells
    width = max((len(text) for cells in texts.values() for text in cells), default=1) + 1
    lines = [_label(one, table.p) + _cut("".join(cell.ljust(width) for cell in cells)) for one, cells in texts.items()]
    if len(ranks) < table.p or first > 0 or last < longest:
        rows = f"rows {first}..{min(last, longest) - 1} of {longest}"
        lines.append(f"({rows}, ranks {ranks[0]}..{ranks[-1]} of {table.p})")
    return "\n".join(lines)


def _row_texts(table: ScheduleTable, rank: int, first: int, last: int) -> list[str]:
    begin, end = int(table.offsets[rank]), int(table.offsets[rank + 1])
    return [str(table.action(index)) for index in range(min(begin + first, end), min(begin + last, end))]


def _cells(table: ScheduleTable, simulation: Simulation, rank: int, unit: float) -> list[_Placed]:
    """The actions of a rank on the grid, an overlapped pair as one."""
    row = table.row_of(rank)
    starts, ends = (
        np.minimum(np.rint(times[row] / unit), _FARTHEST).astype(np.int64).tolist()
        for times in (simulation.start, simulation.end)
    )
    plain = table.v == 1 and table.placement == tuple(range(table.p))
    pairs = set(table.overlaps[(table.overlaps >= row.start) & (table.overlaps < row.stop)].tolist())

    def text_of(index: int) -> str:
        action = table.action(index)
        return f"{action.kind.name}{action.microbatch}" if plain else str(action)

    cells = []
    for index, (start, end) in enumerate(zip(starts, ends, strict=True), start=row.start):
        if index - 1 in pairs:
            continue
        text = f"{text_of(index)}&{text_of(index + 1)}" if index in pairs else text_of(index)
        cells.append(_Placed(text, index, start, end - start))
        if start > _MOST_COLUMNS:
            break
    return cells


def _unit(simulation: Simulation) -> float:
    times = np.concatenate((simulation.start, simulation.end))
    whole = np.rint(times)
    if np.array_equal(times, whole) and whole.max(initial=0.0) <= _FARTHEST:
        return float(max(1, np.gcd.reduce(whole.astype(np.int64), initial=0)))
    lengths = simulation.end - simulation.start
    return float(lengths[lengths > 0].min(initial=np.inf))


def _label(rank: int, p: int) -> str:
    return f"rank {rank:<{len(str(p - 1))}} | "


def _cut(line: str) -> str:
    line = line.rstrip()
    return line if len(line) <= _MOST_COLUMNS else line[: _MOST_COLUMNS - 4] + " ..."


def _more(p: int) -> list[str]:
    return [f"({p - _MOST_RANKS} more ranks)"] if p > _MOST_RANKS else []
