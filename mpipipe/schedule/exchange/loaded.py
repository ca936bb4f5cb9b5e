"""A table that was read from a file, and where in the file its actions stand. Letters: p = num_ranks, A = number of
actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpipipe.schedule.table import ScheduleTable


class Place(NamedTuple):
    """Line and cell of a file, both counted from 1; ``cell`` is None for a whole row."""

    line: int
    cell: int | None


@dataclass(frozen=True, eq=False)
class LoadedTable:
    """``table`` as read from ``file``. ``lines`` int64 (p,): the line of each rank's row, from 1; ``cells`` int32 (A,):
    the cell of each action in its line, from 1. Both None for an HDF5 file, which has no lines."""

    table: ScheduleTable
    file: str
    lines: NDArray[np.int64] | None = None
    cells: NDArray[np.int32] | None = None

    def place(self, rank: int, row: int | None = None) -> Place | None:
        """Where the action at ``row`` of the list of ``rank`` stands, as ``Problem`` gives them; the whole line for no
        row. None where the file has no lines."""
        if self.lines is None or self.cells is None:
            return None
        line = int(self.lines[rank])
        return Place(line, None if row is None else int(self.cells[int(self.table.offsets[rank]) + row]))

    def where(self, rank: int, row: int | None = None) -> str:
        """The same as text that begins a message: ``table.csv:3, cell 7``, or the file alone."""
        place = self.place(rank, row)
        if place is None:
            return self.file
        return f"{self.file}:{place.line}" + ("" if place.cell is None else f", cell {place.cell}")


def too_large(num_stages: int, m: int, num_actions: int) -> str | None:
    """Why a table of so few actions can't be meant to have so many stages and microbatches; None if it can.

    Checks and simulations keep a number for each stage and microbatch: one wrong digit must not ask for gigabytes.
    """
    most = 1_000_000 + 16 * num_actions
    if num_stages * m <= most:
        return None
    return f"{num_stages} stages of {m} microbatches do not fit a table of {num_actions} actions"
