"""The picture of a step: ranks from top to bottom, time from left to right, measured above simulated on one time
axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpipipe.analysis.load import Segment
from mpipipe.analysis.summary import averaged_steps, measured_bubble, measured_costs, step_bounds
from mpipipe.errors import MissingDependencyError, TraceFormatError
from mpipipe.formats.trace import COMPUTE_KINDS, LAST_COMPUTE_KIND, LAST_PIPELINE_KIND, EventKind
from mpipipe.schedule import Kind, ScheduleTable, Simulation, simulate
from mpipipe.schedule.draw_png import shade

_IDLE = "#f2f2f2"
_HATCH = "#bdbdbd"
_SEND = "#7b6fb0"
_OPTIMIZER = "#8c6d31"
_OTHER = "#9aa5ad"
_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_MOST_NUMBERS = 4000
_SMALLEST_FONT = 4.5
_WIDTH_INCHES = 14.0
_BAR = 0.82


def draw_spacetime(segment: Segment, step: int, path: str | Path) -> None:
    """Write a PNG of ``step``. The simulated half is the step's own table with each stage's mean measured costs.

    Raises TraceFormatError for a step that is not whole on all ranks or has no table; MissingDependencyError without
    matplotlib.
    """
    table = segment.table_of(step) if step in segment.steps else None
    if table is None:
        raise TraceFormatError(f"{segment.path}: no whole step {step} with a schedule table; whole: {segment.steps}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("drawing a PNG needs matplotlib") from error
    steps = averaged_steps(segment)[1]
    simulation = simulate(table, measured_costs(segment, steps))
    start, end = step_bounds(segment, step)
    last = max(_last_end(segment, step) - start, simulation.makespan)
    unit, scale = _unit(last)
    ranks = sorted(segment.ranks)
    height = min(40.0, 2.6 + 0.36 * (len(ranks) + table.p))
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[len(ranks), table.p])
    font = _font(figure, simulation, last)
    for place, rank in enumerate(ranks):
        _measured(upper, place, segment.ranks[rank].events_of(step), start, scale, table, font)
    _simulated(lower, simulation, scale, font)
    _frame(upper, [f"rank {rank}" for rank in ranks], last / scale)
    _frame(lower, [f"rank {rank}" for rank in range(table.p)], last / scale)
    for axes, until in ((upper, end - start), (lower, simulation.makespan)):
        axes.axvline(until / scale, color="#444444", linewidth=0.8, linestyle=(0, (3, 2)))
    head = f"step {step}, {table.name}, p={table.p} v={table.v} m={table.m}"
    took = (end - start) / scale
    upper.set_title(
        f"Measured ({head}): {took:.4g} {unit}, bubble fraction {measured_bubble(segment, step):.3f}",
        loc="left",
        fontsize=10.5,
    )
    lower.set_title(
        f"Simulated with each stage's mean measured costs, messages free: {simulation.makespan / scale:.4g} {unit}, "
        f"bubble fraction {simulation.bubble_fraction:.3f}",
        loc="left",
        fontsize=10.5,
    )
    shades = f"; light to dark: chunk 0 to {table.v - 1}" if table.v > 1 else ""
    lower.set_xlabel(f"{unit} since the step's first action (number: microbatch{shades}; dashed: end of the pipeline)")
    _legend(figure, segment, step, table)
    figure.savefig(path, format="png")


def _measured(
    axes: Any, place: int, events: npt.NDArray[np.void], start: int, scale: float, table: ScheduleTable, font: float
) -> None:
    t0, length = (events["t0_ns"] - start) / scale, (events["t1_ns"] - events["t0_ns"]) / scale
    kinds = events["kind"]
    waits = (kinds == EventKind.RECV_WAIT) | (kinds == EventKind.SEND_WAIT)
    spans = np.column_stack((t0, length))
    box = (place - _BAR / 2, _BAR)
    axes.broken_barh(spans[waits], box, facecolor="#fafafa", edgecolor=_HATCH, hatch="////", linewidth=0)
    others = (kinds > LAST_PIPELINE_KIND) & (kinds != EventKind.OPTIMIZER) & (t0 >= 0)
    axes.broken_barh(spans[others], box, facecolor=_OTHER, linewidth=0)
    axes.broken_barh(spans[kinds == EventKind.OPTIMIZER], box, facecolor=_OPTIMIZER, linewidth=0)
    edge = 0.5 if len(events) <= _MOST_NUMBERS else 0.0
    chunks = np.where(events["chunk"] == 255, 0, events["chunk"])
    for kind in COMPUTE_KINDS:
        for chunk in np.unique(chunks[kinds == kind]).tolist():
            colour = shade(Kind(int(kind)), min(chunk, table.v - 1), table.v)
            chosen = (kinds == kind) & (chunks == chunk)
            axes.broken_barh(spans[chosen], box, facecolor=colour, edgecolor="white", linewidth=edge)
    axes.broken_barh(spans[kinds == EventKind.SEND_POST], box, facecolor=_SEND, linewidth=0)
    if font:
        for index in np.flatnonzero(kinds <= LAST_COMPUTE_KIND).tolist():
            middle = float(t0[index] + length[index] / 2)
            _number(axes, middle, place, int(events["microbatch"][index]), int(chunks[index]), table.v, font)


def _simulated(axes: Any, simulation: Simulation, scale: float, font: float) -> None:
    table = simulation.table
    counts = [0] * table.p
    chunk_of = []
    for rank in table.placement:
        chunk_of.append(counts[rank])
        counts[rank] += 1
    edge = 0.5 if table.num_actions <= _MOST_NUMBERS else 0.0
    for rank in range(table.p):
        row = table.row_of(rank)
        spans = np.column_stack((simulation.start[row], simulation.end[row] - simulation.start[row])) / scale
        chunks = np.array(chunk_of)[table.stages[row]]
        for kind in COMPUTE_KINDS:
            for chunk in np.unique(chunks[table.kinds[row] == kind]).tolist():
                chosen = (table.kinds[row] == kind) & (chunks == chunk)
                colour = shade(Kind(int(kind)), chunk, table.v)
                axes.broken_barh(
                    spans[chosen], (rank - _BAR / 2, _BAR), facecolor=colour, edgecolor="white", linewidth=edge
                )
        if font:
            for (left, width), chunk, microbatch in zip(spans, chunks, table.microbatches[row], strict=True):
                _number(axes, float(left + width / 2), rank, int(microbatch), int(chunk), table.v, font)


def _number(axes: Any, x: float, y: float, microbatch: int, chunk: int, v: int, font: float) -> None:
    light = v > 1 and chunk < (v - 1) / 2
    colour = "black" if light else "white"
    axes.text(x, y, str(microbatch), ha="center", va="center_baseline", fontsize=font, color=colour, clip_on=True)


def _font(figure: Any, simulation: Simulation, last: float) -> float:
    """Size of the numbers in points for the shortest action of the table; 0 where they would not be readable."""
    table = simulation.table
    lengths = simulation.end - simulation.start
    if table.num_actions > _MOST_NUMBERS or not np.any(lengths > 0):
        return 0.0
    points = figure.get_figwidth() * 72 * 0.9 * float(lengths[lengths > 0].min()) / last
    size = min(9.0, points / (0.62 * len(str(table.m - 1)) + 0.25))
    return size if size >= _SMALLEST_FONT else 0.0


def _frame(axes: Any, labels: list[str], last: float) -> None:
    axes.set_facecolor(_IDLE)
    axes.set_xlim(0, last * 1.002)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    every = max(1, -(-len(labels) // 32))
    axes.set_yticks(range(0, len(labels), every), labels[::every])
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _legend(figure: Any, segment: Segment, step: int, table: ScheduleTable) -> None:
    from matplotlib.patches import Patch

    found = np.unique(np.concatenate([one.events_of(step)["kind"] for one in segment.ranks.values()]))
    handles = [
        Patch(color=shade(Kind(int(kind)), table.v - 1, table.v), label=_NAMES[kind.name])
        for kind in COMPUTE_KINDS
        if kind in found
    ]
    waiting = "waiting for a message"
    handles.append(Patch(facecolor="#fafafa", edgecolor=_HATCH, hatch="////", linewidth=0, label=waiting))
    handles.append(Patch(facecolor=_IDLE, edgecolor="#d0d0d0", label="idle"))
    if EventKind.SEND_POST in found:
        handles.append(Patch(color=_SEND, label="starting a send"))
    if EventKind.OPTIMIZER in found:
        handles.append(Patch(color=_OPTIMIZER, label="optimizer"))
    if any(kind > LAST_PIPELINE_KIND and kind != EventKind.OPTIMIZER for kind in found.tolist()):
        handles.append(Patch(color=_OTHER, label="other (data, reduce, clip ...)"))
    figure.legend(handles=handles, loc="outside upper left", ncols=9, frameon=False, fontsize=9)


def _last_end(segment: Segment, step: int) -> int:
    """Latest end of any event of the step that began before the rank's step was over."""
    ends = []
    for one in segment.ranks.values():
        events, row = one.events_of(step), one.row_of(step)
        limit = int(row["t1_ns"]) if row is not None else int(events["t1_ns"].max())
        ends.append(int(events["t1_ns"][events["t0_ns"] <= limit].max()))
    return max(ends)


def _unit(span_ns: float) -> tuple[str, float]:
    """(name, ns in it) of the unit in which the picture's time axis has readable numbers."""
    for name, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if span_ns >= 3 * size:
            return name, size
    return "ns", 1.0
