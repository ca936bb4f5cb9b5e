"""A table as text: a line a rank, time from left to right. Letters: p = num_ranks."""

from __future__ import annotations

import math

import numpy as np

from mpipipe.errors import ScheduleError
from mpipipe.schedule.simulate import Simulation, simulate
from mpipipe.schedule.table import ScheduleTable

_MOST_RANKS = 64
_MOST_COLUMNS = 2000
_DRAWN_UP_TO = 20_000


def draw_text(table: ScheduleTable, simulation: Simulation | None = None) -> str:
    """The table on a time axis: ``F0`` is a forward of microbatch 0, ``B0---`` a backward, ``.`` a unit of waiting.

    Without ``simulation`` the costs are F = I = W = 1. One column is the largest time that divides all starts and
    ends; where the times are not whole numbers, starts are rounded to the shortest action. With more stages than ranks
    a cell begins with the stage: ``2F0``. ``F3&B1--`` is a pair that runs at once. Lines end after 2000 characters and
    64 ranks, with a note. Raises ScheduleError for a table that is not legal.
    """
    simulation = simulate(table) if simulation is None else simulation
    table = simulation.table
    unit = _unit(simulation)
    ranks = range(min(table.p, _MOST_RANKS))
    cells = [_cells(table, simulation, rank, unit) for rank in ranks]
    width = max((math.ceil((len(text) + 1) / units) for row in cells for text, _, units in row if units), default=1)
    columns = round(simulation.makespan / unit)
    lines = []
    for rank, row in zip(ranks, cells, strict=True):
        parts, at = [], 0
        for text, column, units in row:
            parts.append(".".ljust(width) * (column - at))
            parts.append(_cell(text, units, width))
            at = max(at, column + units)
        parts.append(".".ljust(width) * (columns - at))
        lines.append(_label(rank, table.p) + _cut("".join(parts)))
    return "\n".join(lines + _more(table.p))


def _cell(text: str, units: int, width: int) -> str:
    """Text of one action over ``units`` columns: dashes to its end where it is longer than one."""
    if units <= 1:
        return text.ljust(width) if units else ""
    return text.ljust(units * width - 1, "-") + " "


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


def _cells(table: ScheduleTable, simulation: Simulation, rank: int, unit: float) -> list[tuple[str, int, int]]:
    """(text, first column, number of columns) of each action of a rank."""
    row = table.row_of(rank)
    starts = np.rint(simulation.start[row] / unit).astype(np.int64).tolist()
    ends = np.rint(simulation.end[row] / unit).astype(np.int64).tolist()
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
        cells.append((text, start, end - start))
        if start > _MOST_COLUMNS:
            break
    return cells


def _unit(simulation: Simulation) -> float:
    times = np.concatenate((simulation.start, simulation.end))
    whole = np.rint(times)
    if np.array_equal(times, whole):
        return float(max(1, np.gcd.reduce(whole.astype(np.int64), initial=0)))
    lengths = simulation.end - simulation.start
    return float(lengths[lengths > 0].min())


def _label(rank: int, p: int) -> str:
    return f"rank {rank:<{len(str(p - 1))}} | "


def _cut(line: str) -> str:
    line = line.rstrip()
    return line if len(line) <= _MOST_COLUMNS else line[: _MOST_COLUMNS - 4] + " ..."


def _more(p: int) -> list[str]:
    return [f"({p - _MOST_RANKS} more ranks)"] if p > _MOST_RANKS else []
