"""A simulated table as a picture. matplotlib is loaded when something is drawn. Letters: p = num_ranks, v =
chunks_per_rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mpipipe.errors import MissingDependencyError, ScheduleError
from mpipipe.schedule.action import Kind
from mpipipe.schedule.simulate import Simulation
from mpipipe.schedule.table import ScheduleTable

_COLOURS = {Kind.F: ("#2f6db3", "forward"), Kind.B: ("#c8641e", "backward"), Kind.I: ("#b03a48", "input gradient"),
            Kind.W: ("#4a8c3f", "weight gradient")}  # fmt: skip
_IDLE = "#ececec"
_DRAWN_UP_TO = 100_000
_WIDTH_INCHES, _MOST_INCHES = 13.0, 30.0
_SMALLEST_FONT = 4.5


def draw_png(table: ScheduleTable, simulation: Simulation, path: Path | str) -> None:
    """Write a picture: a bar a rank, time from left to right, colour by kind, darker for higher chunks, microbatch
    numbers where they fit.

    Raises ScheduleError for more than 100,000 actions and MissingDependencyError without matplotlib.
    """
    if simulation.table.num_actions > _DRAWN_UP_TO:
        raise ScheduleError(
            f"{table!r} is too large for a picture of at most {_DRAWN_UP_TO} actions: "
            "take a smaller p, v or m, or the text form"
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("drawing a PNG needs matplotlib: pip install 'mpipipe[plot]'") from error
    height = min(_MOST_INCHES, 1.5 + 0.42 * table.p)
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _bars(axes, simulation)
    _numbers(axes, simulation, figure)
    _frame(axes, table, simulation)
    figure.savefig(path, format="png")


def shade(kind: Kind, chunk: int, v: int) -> tuple[float, float, float]:
    """Colour (red, green, blue, each 0..1) of an action: that of its kind, lightest for chunk 0."""
    colour = np.array([int(_COLOURS[kind][0][at : at + 2], 16) / 255 for at in (1, 3, 5)])
    white = 0.0 if v == 1 else 0.55 * (1 - chunk / (v - 1))
    red, green, blue = (colour * (1 - white) + white).tolist()
    return red, green, blue


def _chunks(table: ScheduleTable) -> list[int]:
    """The chunk number of every stage."""
    counts = [0] * table.p
    chunks = []
    for rank in table.placement:
        chunks.append(counts[rank])
        counts[rank] += 1
    return chunks


def _bars(axes: Any, simulation: Simulation) -> None:
    table = simulation.table
    chunks = np.array(_chunks(table))
    edge = 0.6 if table.num_actions <= 4000 else 0.0
    for rank in range(table.p):
        row = table.row_of(rank)
        start, length = simulation.start[row], simulation.end[row] - simulation.start[row]
        axes.broken_barh([(0, simulation.makespan)], (rank - 0.4, 0.8), color=_IDLE, linewidth=0)
        kinds, own = table.kinds[row], chunks[table.stages[row]]
        for kind in Kind:
            for chunk in np.unique(own[kinds == kind]).tolist():
                chosen = (kinds == kind) & (own == chunk)
                spans = np.column_stack((start[chosen], length[chosen]))
                colour = shade(kind, chunk, table.v)
                axes.broken_barh(spans, (rank - 0.4, 0.8), facecolor=colour, edgecolor="white", linewidth=edge)


def _numbers(axes: Any, simulation: Simulation, figure: Any) -> None:
    """The microbatch in every cell, if the shortest cell has room for it in a readable size."""
    table = simulation.table
    lengths = simulation.end - simulation.start
    digits = len(str(table.m - 1))
    if table.num_actions > 4000 or not np.any(lengths > 0):
        return
    points = figure.get_figwidth() * 72 * 0.9 * float(lengths[lengths > 0].min()) / simulation.makespan
    size = min(9.0, points / (0.62 * digits + 0.25))
    if size < _SMALLEST_FONT:
        return
    chunks = _chunks(table)
    for rank in range(table.p):
        for index in range(*table.row_of(rank).indices(table.num_actions)):
            action = table.action(index)
            light = table.v > 1 and chunks[action.stage] < (table.v - 1) / 2
            middle = (simulation.start[index] + simulation.end[index]) / 2
            colour = "black" if light else "white"
            axes.text(middle, rank, str(action.microbatch), ha="center", va="center_baseline", fontsize=size,
            color=colour)


def _frame(axes: Any, table: ScheduleTable, simulation: Simulation) -> None:
    from matplotlib.patches import Patch

    axes.set_xlim(0, max(simulation.makespan, 1e-9))
    axes.set_ylim(table.p - 0.5, -0.5)
    step = max(1, -(-table.p // 40))
    axes.set_yticks(range(0, table.p, step), [f"rank {rank}" for rank in range(0, table.p, step)])
    axes.tick_params(length=0)
    axes.set_xlabel("time, in the unit of the costs")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figures = f"makespan {simulation.makespan:g}, bubble fraction {simulation.bubble_fraction:.3f}"
    title = f"{table.name}   p={table.p} v={table.v} m={table.m}   {figures}"
    axes.set_title(title, loc="left", fontsize=11, pad=8)
    used = [kind for kind in _COLOURS if np.any(simulation.table.kinds == kind)]
    last = table.v - 1
    handles = [Patch(color=shade(kind, last, table.v), label=_COLOURS[kind][1]) for kind in used]
    handles.append(Patch(color=_IDLE, label="waiting"))
    note = f"light to dark: chunk 0 to {last}" if last else None
    axes.legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=5, frameon=False, fontsize=9,
        title=note, title_fontsize=8, borderaxespad=0.2,
    )  # fmt: skip
