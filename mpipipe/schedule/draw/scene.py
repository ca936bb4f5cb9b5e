"""What a picture of a simulated table shows, and where: shapes in pixels from the upper left corner.

SVG and PNG are two ways to put the same scene on paper; neither decides anything. Letters: p = num_ranks, v =
chunks_per_rank, A = number of actions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpipipe.errors import ScheduleError
from mpipipe.schedule.action import Kind
from mpipipe.schedule.critical_path import critical_path
from mpipipe.schedule.draw import colours
from mpipipe.schedule.draw.words import costs_words, figures_words, printable, shortened
from mpipipe.schedule.memory import MemoryCurve, memory_curve
from mpipipe.schedule.phases import Phase, phase_bounds
from mpipipe.schedule.simulate import Simulation
from mpipipe.schedule.table import ScheduleTable

MOST_ACTIONS = 100_000
"""Actions of the largest table that is drawn as SVG or PNG."""

DIGIT = 0.64
"""Width of a digit in font sizes."""

_NARROWEST, _WIDEST, _WITHOUT_NUMBERS = 1280, 2400, 1600
_SHORTEST = 2.2
_LEFT, _RIGHT, _TOP, _BOTTOM = 66.0, 52.0, 68.0, 44.0
_LARGEST_NUMBER, _SMALLEST_NUMBER, _MOST_NUMBERS = 11.0, 5.0, 6000
_LANES_HEIGHT, _TALLEST, _LOWEST = 1280.0, 74.0, 6.0


class Text(NamedTuple):
    """``y`` is the middle of the line; ``anchor`` start, middle or end."""

    x: float
    y: float
    text: str
    size: float
    anchor: str = "start"
    colour: str = colours.TEXT
    bold: bool = False


class Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    colour: str


class Line(NamedTuple):
    """A line through points; ``fill`` fills what it encloses."""

    points: tuple[tuple[float, float], ...]
    colour: str
    width: float
    fill: str | None = None


class Frame(NamedTuple):
    """The outline of a part of the critical path."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, eq=False)
class Scene:
    """``bars`` float64 (A, 4): x, y, width and height of every action, as in the flat arrays; ``styles`` int64 (A,)
    into ``fills`` and ``inks``; ``numbers``: flat indices of the actions that show their microbatch, all in
    ``number_size``. ``edges``: width of the white line around each action, 0 for none.

    Layers from back to front: ``back``, ``curves``, bars, ``stripes``, numbers, ``links`` and ``frames`` (the critical
    path: ``halo`` and ``stroke`` are its widths), ``texts``.
    """

    simulation: Simulation
    title: str
    width: float
    height: float
    bars: NDArray[np.float64]
    styles: NDArray[np.int64]
    fills: tuple[str, ...]
    inks: tuple[str, ...]
    numbers: NDArray[np.int64]
    number_size: float
    edges: float
    halo: float
    stroke: float
    back: list[Box] = field(default_factory=list)
    curves: list[Line] = field(default_factory=list)
    stripes: list[Box] = field(default_factory=list)
    links: list[Line] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)


class Layout(NamedTuple):
    """Heights within a lane, and the scale of time."""

    width: float
    per_unit: float
    lane: float
    strip: float
    bar: float
    curve: float

    def x(self, time: float) -> float:
        return _LEFT + time * self.per_unit

    def top(self, rank: int) -> float:
        """Upper edge of a rank's bar."""
        return _TOP + rank * self.lane + self.strip

    def floor(self, rank: int) -> float:
        """Lower edge of a rank's memory curve."""
        return self.top(rank) + self.bar + self.curve


def compose(table: ScheduleTable, simulation: Simulation) -> Scene:
    """The scene of ``simulation``, named as ``table``. Raises ScheduleError for more than 100,000 actions."""
    if simulation.table.num_actions > MOST_ACTIONS:
        raise ScheduleError(
            f"{table!r} is too large for a picture of at most {MOST_ACTIONS} actions: take a smaller p, v or m, the "
            "text form, or the html form, which holds 200000"
        )
    layout = _layout(simulation)
    chunks, count = numbered_chunks(simulation.table)
    styles, fills, inks = _styles(simulation.table, chunks, count)
    bars = _bars(simulation, layout)
    numbers, size = _numbers(simulation.table, bars, layout)
    wide = float(np.median(bars[:, 2])) if bars.size else 0.0
    scene = Scene(
        simulation=simulation,
        title=printable(table.name),
        width=layout.width,
        height=_TOP + simulation.table.p * layout.lane + _BOTTOM,
        bars=bars,
        styles=styles,
        fills=fills,
        inks=inks,
        numbers=numbers,
        number_size=size,
        edges=0.8 if wide >= 5 else 0.0,
        halo=4.0 if layout.bar > 16 else 2.4,
        stroke=2.0 if layout.bar > 16 else 1.1,
    )
    curves = [memory_curve(simulation, rank) for rank in range(simulation.table.p)]
    most = max(curve.peak for curve in curves)
    for rank, curve in enumerate(curves):
        _lane(scene, layout, rank, curve, most)
    _phases(scene, layout)
    _mark_copies(scene)
    _mark_path(scene)
    _head(scene, count)
    _axis(scene, layout)
    return scene


def numbered_chunks(table: ScheduleTable) -> tuple[NDArray[np.int64], int]:
    """The chunk of each action on its rank, int64 (A,), and how many there are: v, or 2v where stages have second
    copies, which come last."""
    counts = [0] * table.p
    chunk_of = np.zeros(table.num_stages, dtype=np.int64)
    for stage, rank in enumerate(table.placement):
        chunk_of[stage] = counts[rank]
        counts[rank] += 1
    count = max(counts)
    chunks = chunk_of[table.stages]
    if table.mirror is None:
        return chunks, count
    return chunks + count * (table.microbatches >= table.first_mirrored), 2 * count


def _layout(simulation: Simulation) -> Layout:
    table = simulation.table
    lengths = simulation.end - simulation.start
    shortest = float(lengths[lengths > 0].min(initial=math.inf))
    time = simulation.makespan if simulation.makespan > 0 else 1.0
    digits = len(str(table.m - 1))
    needed = (_SMALLEST_NUMBER + 1) * (DIGIT * digits + 0.3) * time / shortest + _LEFT + _RIGHT
    if needed <= _WIDEST:
        width = float(max(_NARROWEST, math.ceil(needed)))
    else:
        width = float(np.clip(math.ceil(min(_SHORTEST * time / shortest, 2.0 * _WIDEST)), _WITHOUT_NUMBERS, _WIDEST))
    lane = float(np.clip(round(_LANES_HEIGHT / table.p), _LOWEST, _TALLEST))
    strip, curve, gap = (max(1.0, round(part * lane)) for part in (0.06, 0.32, 0.12))
    return Layout(width, (width - _LEFT - _RIGHT) / time, lane, strip, lane - strip - curve - gap, curve)


def _styles(
    table: ScheduleTable, chunks: NDArray[np.int64], count: int
) -> tuple[NDArray[np.int64], tuple[str, ...], tuple[str, ...]]:
    """A style for each kind and chunk that the table has."""
    codes, styles = np.unique(table.kinds * np.int64(count) + chunks, return_inverse=True)
    pairs = [(Kind(code // count), code % count) for code in codes.tolist()]
    fills = tuple(colours.fill(kind, chunk, count) for kind, chunk in pairs)
    return styles.astype(np.int64), fills, tuple(colours.STYLES[kind].ink for kind, _ in pairs)


def _bars(simulation: Simulation, layout: Layout) -> NDArray[np.float64]:
    """The box of each action; the two of an overlapped pair have half the height each, in the order of the table."""
    table = simulation.table
    bars = np.empty((table.num_actions, 4))
    bars[:, 0] = _LEFT + simulation.start * layout.per_unit
    bars[:, 2] = (simulation.end - simulation.start) * layout.per_unit
    tops = np.array([layout.top(rank) for rank in range(table.p)])
    bars[:, 1] = np.repeat(tops, np.diff(table.offsets))
    bars[:, 3] = layout.bar
    pairs = table.overlaps
    bars[pairs, 3] = bars[pairs + 1, 3] = layout.bar / 2
    bars[pairs + 1, 1] += layout.bar / 2
    return bars


def _numbers(
    table: ScheduleTable, bars: NDArray[np.float64], layout: Layout
) -> tuple[NDArray[np.int64], float]:
    """Which actions show their microbatch, and the size: what nine of ten have room for, 5 to 11."""
    if not bars.size or table.num_actions > _MOST_NUMBERS:
        return np.empty(0, dtype=np.int64), 0.0
    digits = np.char.str_len(table.microbatches.astype(str))
    room = np.minimum(bars[:, 2] / (DIGIT * digits + 0.3), bars[:, 3] / 1.1)
    size = float(np.clip(np.percentile(room, 10), _SMALLEST_NUMBER, min(_LARGEST_NUMBER, layout.bar)))
    return np.flatnonzero(room >= size - 1e-9), round(size, 2)


def _lane(scene: Scene, layout: Layout, rank: int, curve: MemoryCurve, most: float) -> None:
    """The background, label and memory curve of a rank."""
    top, floor = layout.top(rank), layout.floor(rank)
    time = scene.simulation.makespan
    scene.back.append(Box(_LEFT, top, time * layout.per_unit, layout.bar, colours.IDLE))
    every = math.ceil(9.5 / layout.lane)
    size = float(np.clip(layout.lane * 0.55, 6.5, 12))
    shown = rank % every == 0
    if shown:
        scene.texts.append(Text(_LEFT - 8, top + layout.bar / 2, f"rank {rank}", size, "end"))
    if not curve.times.size or most <= 0:
        return
    heights = (floor - curve.kept / most * layout.curve).tolist()
    points = [(layout.x(0.0), floor)]
    for time, height in zip(curve.times.tolist(), heights, strict=True):
        points += [(layout.x(time), points[-1][1]), (layout.x(time), height)]
    points.append((points[-1][0], floor))
    line = 1.0 if layout.curve > 9 else 0.5
    scene.curves.append(Line(tuple(points), colours.MEMORY_LINE, line, colours.MEMORY_FILL))
    if shown:
        place = Text(scene.width - _RIGHT + 6, floor - layout.curve / 2, f"{curve.peak:g}", min(size, 10.5))
        scene.texts.append(place._replace(colour=colours.MEMORY_LINE))


def _phases(scene: Scene, layout: Layout) -> None:
    """The strip above each bar."""
    for rank, bounds in enumerate(phase_bounds(scene.simulation).tolist()):
        y = layout.top(rank) - layout.strip
        for phase, begin, end in zip(Phase, bounds, bounds[1:], strict=False):
            if end > begin:
                width = (end - begin) * layout.per_unit
                scene.back.append(Box(layout.x(begin), y, width, layout.strip, colours.PHASE_COLOURS[phase]))


def _mark_copies(scene: Scene) -> None:
    """A stripe in the actions of second copies, one for neighbours together."""
    table = scene.simulation.table
    if table.mirror is None:
        return
    for index in np.flatnonzero(table.microbatches >= table.first_mirrored).tolist():
        x, y, width, height = scene.bars[index].tolist()
        thick = max(0.6, 0.08 * height)
        stripe = Box(x, y + height - 2 * thick, width, thick, colours.STRIPE)
        last = scene.stripes[-1] if scene.stripes else None
        if last and last.y == stripe.y and abs(last.x + last.width - x) < 1e-6:
            scene.stripes[-1] = last._replace(width=x + width - last.x)
        else:
            scene.stripes.append(stripe)


def _mark_path(scene: Scene) -> None:
    """The critical path: a frame around neighbours, a line for each message to another rank."""
    for index in critical_path(scene.simulation).tolist():
        x, y, width, height = scene.bars[index].tolist()
        if width <= 0:
            continue
        last = scene.frames[-1] if scene.frames else None
        if last and last.y == y and last.height == height and abs(last.x + last.width - x) < 1e-6:
            scene.frames[-1] = last._replace(width=x + width - last.x)
            continue
        if last:
            ends = ((last.x + last.width, last.y + last.height / 2), (x, y + height / 2))
            scene.links.append(Line(ends, colours.PATH, scene.stroke))
        scene.frames.append(Frame(x, y, width, height))


def _head(scene: Scene, count: int) -> None:
    """Title, figures and legend."""
    simulation, table = scene.simulation, scene.simulation.table
    name = shortened(scene.title, 60)
    scene.texts.append(Text(_LEFT, 16, f"{name} · p={table.p} v={table.v} m={table.m}", 15, bold=True))
    scene.texts.append(Text(_LEFT, 35, figures_words(simulation), 12))
    x = _LEFT
    for kind, style in colours.STYLES.items():
        if not np.any(table.kinds == kind):
            continue
        for chunk in (0, count - 1) if count > 1 else (0,):
            scene.back.append(Box(x, 49, 9, 11, colours.fill(kind, chunk, count)))
            if table.mirror is not None and chunk:
                scene.back.append(Box(x, 57, 9, 1.5, colours.STRIPE))
            x += 9
        x = _entry(scene, x, style.name)
    x = _swatch(scene, x, colours.IDLE, "waiting")
    for phase, colour in colours.PHASE_COLOURS.items():
        scene.back.append(Box(x, 52.5, 14, 4, colour))
        x = _entry(scene, x + 14, phase.title)
    scene.frames.append(Frame(x, 49, 14, 11))
    x = _entry(scene, x + 16, "critical path")
    ends = ((x, 60.0), (x, 55.0), (x + 7, 55.0), (x + 7, 50.0), (x + 14, 50.0), (x + 14, 60.0))
    scene.curves.append(Line(ends, colours.MEMORY_LINE, 1.0, colours.MEMORY_FILL))
    _entry(scene, x + 14, "activations kept, most at the right")
    note = f"light to dark: chunk 0 to {count - 1}" if count > 1 else ""
    if table.mirror is not None:
        note = "light: first copy, down the ranks; dark, with a stripe: second copy, up"
    scene.texts.append(Text(scene.width - _RIGHT, 35, note, 11, "end"))


def _swatch(scene: Scene, x: float, colour: str, text: str) -> float:
    scene.back.append(Box(x, 49, 14, 11, colour))
    return _entry(scene, x + 14, text)


def _entry(scene: Scene, x: float, text: str) -> float:
    """A word of the legend; where the next entry begins."""
    scene.texts.append(Text(x + 5, 54.5, text, 11))
    return x + 5 + 5.9 * len(text) + 15


def _axis(scene: Scene, layout: Layout) -> None:
    simulation = scene.simulation
    y = _TOP + simulation.table.p * layout.lane + 2
    right = layout.x(simulation.makespan)
    scene.curves.append(Line(((_LEFT, y), (right, y)), colours.FAINT, 1.0))
    for tick in ticks(simulation.makespan, 12):
        x = layout.x(tick)
        scene.curves.append(Line(((x, y), (x, y + 4)), colours.FAINT, 1.0))
        scene.texts.append(Text(x, y + 12, f"{tick:g}", 10.5, "middle", colours.FAINT))
    unit = "time, in the unit of the costs"
    scene.texts.append(Text((_LEFT + right) / 2, y + 29, f"{unit} ({costs_words(simulation)})", 11, "middle"))


def ticks(until: float, most: int) -> list[float]:
    """Round times 0, s, 2s, ... up to ``until``, at most ``most`` + 1, s one of 1, 2, 5 times a power of ten."""
    if not until > 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(until / most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor * most >= until)
    return [float(f"{number * step:.12g}") for number in range(int(until / step + 1e-9) + 1)]
