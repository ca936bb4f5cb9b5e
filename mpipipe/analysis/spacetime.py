"""The picture of a step: ranks from top to bottom, time from left to right, measured above simulated on one time
axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpipipe.analysis.load import Segment
from mpipipe.analysis.segments import place_text
from mpipipe.analysis.summary import averaged_steps, measured_bubble, measured_costs, step_bounds
from mpipipe.errors import MissingDependencyError, TraceFormatError
from mpipipe.formats.trace import COMPUTE_KINDS, LAST_COMPUTE_KIND, LAST_PIPELINE_KIND, EventKind
from mpipipe.schedule import Kind, ScheduleTable, Simulation, simulate
from mpipipe.schedule.draw.colours import STYLES, shade

_IDLE = "#f2f2f2"
_HATCH = "#bdbdbd"
_END_HATCH = "#c9a0b4"
_SEND = "#7b6fb0"
_OPTIMIZER = "#8c6d31"
_OTHER = "#9aa5ad"
_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_WAIT_STYLE: dict[str, Any] = {"facecolor": "#fafafa", "edgecolor": _HATCH, "hatch": "////", "linewidth": 0}
_END_STYLE: dict[str, Any] = {"facecolor": "#fdf6f9", "edgecolor": _END_HATCH, "hatch": "\\\\\\\\", "linewidth": 0}
_NAMED_KINDS = (int(EventKind.OPTIMIZER), int(EventKind.LOSS))  # with a colour of their own, beyond the pipeline's
_MOST_NUMBERS = 4000
_SMALLEST_FONT, _COMMON_FONT, _LARGEST_FONT = 5.0, 7.0, 9.0
_DIGIT, _MARGIN = 0.64, 0.5  # width of a digit, and what a number leaves free in its box, in font sizes
_WIDTH_INCHES = 14.0
_BAR = 0.82


def draw_spacetime(segment: Segment, step: int, path: str | Path, *, note: str = "") -> None:
    """Write a PNG of ``step``. The simulated half is the step's own table with each stage's mean measured costs.

    ``note`` stands after the step's number in the title: why this one. Raises ConfigError for a step that is not whole
    on all ranks, TraceFormatError for one without a table; MissingDependencyError without matplotlib.
    """
    segment.require_step(step)
    table = segment.table_of(step)
    if table is None:
        raise TraceFormatError(f"{segment.path}: step {step} has no schedule table, so it can't be simulated beside")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("drawing a PNG needs matplotlib") from error
    simulation = simulate(table, measured_costs(segment, averaged_steps(segment)[1]))
    start, end = step_bounds(segment, step)
    last = max(_last_end(segment, step) - start, simulation.makespan)
    unit, scale = _unit(last)
    ranks = sorted(segment.ranks)
    height = min(40.0, 3.0 + 0.36 * (len(ranks) + table.p))
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[len(ranks), table.p])
    above: list[_Box] = []
    for place, rank in enumerate(ranks):
        above += _measured(upper, place, segment.ranks[rank].events_of(step), start, scale, table)
    below = _simulated(lower, simulation, scale)
    _frame(upper, [f"rank {rank}" for rank in ranks], last / scale)
    _frame(lower, [f"rank {rank}" for rank in range(table.p)], last / scale)
    for axes, until in ((upper, end - start), (lower, simulation.makespan)):
        axes.axvline(until / scale, color="#444444", linewidth=0.8, linestyle=(0, (3, 2)))
    where = f"{place_text(segment.number, segment.segments)}, " if len(segment.segments) > 1 else ""
    title = (
        f"Measured: {where}step {step}" + (f", {note}" if note else "") + "\n"
        f"this step: {(end - start) / scale:.4g} {unit}, bubble fraction {measured_bubble(segment, step):.3f} "
        f"({table.name}, p={table.p} v={table.v} m={table.m})"
    )
    upper.set_title(title, loc="left", fontsize=10.5)
    title = (
        f"Simulated with each stage's mean measured costs, messages free: {simulation.makespan / scale:.4g} {unit}, "
        f"bubble fraction {simulation.bubble_fraction:.3f}"
    )
    lower.set_title(title, loc="left", fontsize=10.5)
    shades = f"; light to dark: chunk 0 to {table.v - 1}" if table.v > 1 else ""
    lower.set_xlabel(f"{unit} since the step's first action (number: microbatch{shades}; dashed: end of the pipeline)")
    _legend(figure, segment, step, table)
    figure.draw_without_rendering()  # lays out: the numbers need the width of the axes
    _numbers(upper, above)
    _numbers(lower, below)
    figure.savefig(path, format="png")


class _Box(NamedTuple):
    """A drawn compute action, in the axes' units."""

    left: float
    width: float
    place: int
    microbatch: int
    ink: str


def _measured(
    axes: Any, place: int, events: npt.NDArray[np.void], start: int, scale: float, table: ScheduleTable
) -> list[_Box]:
    """Draw one rank's events; its compute actions."""
    t0, length = (events["t0_ns"] - start) / scale, (events["t1_ns"] - events["t0_ns"]) / scale
    kinds = events["kind"]
    waits = (kinds == EventKind.RECV_WAIT) | (kinds == EventKind.SEND_WAIT)
    spans = np.column_stack((t0, length))
    box = (place - _BAR / 2, _BAR)
    axes.broken_barh(spans[waits], box, **_WAIT_STYLE)
    for_others = kinds == EventKind.LOSS
    axes.broken_barh(spans[for_others], box, **_END_STYLE)
    others = (kinds > LAST_PIPELINE_KIND) & ~np.isin(kinds, _NAMED_KINDS) & (t0 >= 0)
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
    return [
        _Box(float(t0[at]), float(length[at]), place, int(events["microbatch"][at]), STYLES[Kind(int(kinds[at]))].ink)
        for at in np.flatnonzero(kinds <= LAST_COMPUTE_KIND).tolist()
    ]


def _simulated(axes: Any, simulation: Simulation, scale: float) -> list[_Box]:
    """Draw the simulated actions; those of all ranks."""
    table = simulation.table
    counts = [0] * table.p
    chunk_of = []
    for rank in table.placement:
        chunk_of.append(counts[rank])
        counts[rank] += 1
    edge = 0.5 if table.num_actions <= _MOST_NUMBERS else 0.0
    boxes = []
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
        for (left, width), kind, microbatch in zip(spans, table.kinds[row], table.microbatches[row], strict=True):
            boxes.append(_Box(float(left), float(width), rank, int(microbatch), STYLES[Kind(int(kind))].ink))
    return boxes


def _numbers(axes: Any, boxes: list[_Box]) -> None:
    """The microbatch in each box that is wide enough for it; the axes are laid out already."""
    window = axes.get_window_extent()
    points = 72 / axes.figure.dpi
    per_unit = window.width * points / float(np.diff(axes.get_xlim())[0])
    row = window.height * points / abs(float(np.diff(axes.get_ylim())[0])) * _BAR
    sizes = number_sizes([(box.width * per_unit, box.microbatch) for box in boxes])
    for box, font in zip(boxes, sizes, strict=True):
        if font and font <= row:
            axes.text(
                box.left + box.width / 2,
                box.place,
                str(box.microbatch),
                ha="center",
                va="center_baseline",
                fontsize=font,
                color=box.ink,
                clip_on=True,
            )


def number_sizes(boxes: list[tuple[float, int]]) -> list[float]:
    """Font size (points) for the number in each (width in points, number); 0 where it would not fit its box.

    The size is what nine of ten boxes have room for, within 7 to 9; a narrower box has its own, down to 5. All 0 for
    more than 4000 boxes.
    """
    if not boxes or len(boxes) > _MOST_NUMBERS:
        return [0.0] * len(boxes)
    room = [width / (_DIGIT * len(str(number)) + _MARGIN) for width, number in boxes]
    size = min(_LARGEST_FONT, max(_COMMON_FONT, float(np.percentile(room, 10))))
    return [min(size, each) if each >= _SMALLEST_FONT else 0.0 for each in room]


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
    handles.append(Patch(**_WAIT_STYLE, label="waiting for a message"))
    if EventKind.LOSS in found:
        handles.append(Patch(**_END_STYLE, label="waiting for the others at the step's end"))
    if EventKind.SEND_POST in found:
        handles.append(Patch(color=_SEND, label="starting a send"))
    if EventKind.OPTIMIZER in found:
        handles.append(Patch(color=_OPTIMIZER, label="optimizer"))
    if any(kind > LAST_PIPELINE_KIND and kind not in _NAMED_KINDS for kind in found.tolist()):
        handles.append(Patch(color=_OTHER, label="other (data, reduce, clip ...)"))
    handles.append(Patch(facecolor=_IDLE, edgecolor="#d0d0d0", label="no action recorded (simulated: waiting)"))
    columns = len(handles) if len(handles) <= 6 else -(-len(handles) // 2)
    style: dict[str, Any] = {"frameon": False, "fontsize": 9, "columnspacing": 1.4, "handletextpad": 0.5}
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, **style)


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
