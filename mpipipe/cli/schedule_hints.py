"""What ``mpipipe schedule show`` says beside a drawn table, and how much of it a terminal gets."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpipipe.schedule import ScheduleTable, Simulation

TERMINAL_COLUMNS = 200
"""A terminal gets that many columns, or its own width where that is more."""

_WITH_ONE_CHUNK = {"interleaved": "1f1b", "looped-bfs": "gpipe", "interleaved-zb": "zb-h1"}
_KINDS = {"F": "forward", "B": "backward", "I": "input half of a backward", "W": "weight half of a backward"}
_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")


def remarks(table: ScheduleTable, simulation: Simulation) -> list[str]:
    """Lines for below the figures: how to read a cell that begins with its stage, and where the interesting case is."""
    import numpy as np

    from mpipipe.schedule import Kind

    lines = []
    if simulation.makespan == 0:
        lines.append("all costs are 0: nothing takes time, so that there is nothing to draw")
    if table.num_stages > table.p:
        found = set(np.unique(simulation.table.kinds).tolist())
        kinds = [kind.name for kind in Kind if kind in found]
        words = ", ".join(f"{kind} {_KINDS[kind]}" for kind in kinds)
        lines.append(f"1F0 is stage 1's forward of microbatch 0; {words}")
    family = table.name.partition(":")[0]
    if table.v == 1 and family in _WITH_ONE_CHUNK:
        lines.append(f"with one chunk a rank {family} is {_WITH_ONE_CHUNK[family]}: -v 2 gives each rank two")
    return lines


def fitted(drawn: str, output: Path | None) -> str:
    """The drawn table as it is for files and pipes; a terminal's lines end at ``TERMINAL_COLUMNS``, with a note."""
    if output is not None or sys.stdout is None or not sys.stdout.isatty():
        return drawn
    columns = max(TERMINAL_COLUMNS, shutil.get_terminal_size().columns)
    lines = drawn.splitlines()
    longest = max(len(_COLOUR.sub("", line)) for line in lines)
    if longest <= columns:
        return drawn
    note = f"(the first {columns} of {longest} columns; a pipe or -o FILE gets up to 2000, -o FILE.html draws all)"
    return "\n".join([*(_cut(line, columns) for line in lines), note])


def _cut(line: str, columns: int) -> str:
    """At most ``columns`` characters on the screen; what sets and ends colours stays."""
    kept = []
    for part in _COLOUR.split(line):
        if not _COLOUR.fullmatch(part):
            part = part[:columns]
            columns -= len(part)
        kept.append(part)
    return "".join(kept)
