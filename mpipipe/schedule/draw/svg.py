"""A scene as SVG: plain text, the same for the same table, no library."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator

import numpy as np

from mpipipe.schedule.draw import colours
from mpipipe.schedule.draw.scene import Box, Line, Scene, Text, compose
from mpipipe.schedule.draw.words import figures_words
from mpipipe.schedule.phases import Phase, action_phases
from mpipipe.schedule.simulate import Simulation
from mpipipe.schedule.table import ScheduleTable

MOST_TITLES = 20_000
"""Actions of the largest table in which each is an element of its own that says what it is under the mouse."""

_FONT = "DejaVu Sans, Verdana, Arial, sans-serif"


def svg_text(table: ScheduleTable, simulation: Simulation) -> str:
    """The picture of ``simulation``, named as ``table``, as the text of an SVG file.

    A bar a rank, time from left to right: what each action is and when, the phases in a strip above, the kept
    activations below, the critical path framed. Up to 20,000 actions each is a ``rect`` of class ``a`` with a
    ``title``; above, those of a rank and colour are one ``path``. Raises ScheduleError for more than 100,000.
    """
    scene = compose(table, simulation)
    return "\n".join(_elements(scene)) + "\n"


def _elements(scene: Scene) -> Iterator[str]:
    table = scene.simulation.table
    width, height = _number(scene.width), _number(scene.height)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="{_FONT}" role="img">'
    )
    yield "<!-- made by mpipipe -->"
    about = f"{scene.title}, p={table.p} v={table.v} m={table.m}: {figures_words(scene.simulation)}"
    yield f"<title>{_escaped(about)}</title>"
    yield f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    yield from _group("back", (_box(box) for box in scene.back))
    yield from _group("curves", (_line(line) for line in scene.curves), 'stroke-linejoin="round"')
    yield from _titled(scene) if table.num_actions <= MOST_TITLES else _joined(scene)
    yield from _group("copies", (_box(box) for box in scene.stripes), 'pointer-events="none"')
    yield from _numbers(scene)
    critical = "".join([*(_outline(*frame) for frame in scene.frames), *(_way(link) for link in scene.links)])
    for name, colour, stroke in (("halo", colours.HALO, scene.halo), ("path", colours.PATH, scene.stroke)):
        style = f'fill="none" stroke="{colour}" stroke-width="{_number(stroke)}" pointer-events="none"'
        yield f'<path id="{name}" {style} d="{critical}"/>'
    yield from _group("words", (_text(text) for text in scene.texts))
    yield "</svg>"


def _group(name: str, shapes: Iterator[str], attributes: str = "") -> Iterator[str]:
    yield f'<g id="{name}"{" " * bool(attributes)}{attributes}>'
    yield from shapes
    yield "</g>"


def _titled(scene: Scene) -> Iterator[str]:
    """Every action as an element, grouped by rank and then by colour."""
    simulation, table = scene.simulation, scene.simulation.table
    phases = action_phases(table)
    edge = f' stroke="#ffffff" stroke-width="{_number(scene.edges)}"' if scene.edges else ""
    yield f'<g id="actions"{edge}>'
    for rank in range(table.p):
        row = table.row_of(rank)
        for style, fill in enumerate(scene.fills):
            chosen = row.start + np.flatnonzero(scene.styles[row] == style)
            if not chosen.size:
                continue
            yield f'<g fill="{fill}">'
            for index in chosen.tolist():
                x, y, width, height = (_number(value) for value in scene.bars[index].tolist())
                when = f"{simulation.start[index]:g} to {simulation.end[index]:g}"
                about = f"{table.action(index)}, rank {rank}, {when}, {Phase(int(phases[index])).title}"
                yield (
                    f'<rect class="a" x="{x}" y="{y}" width="{width}" height="{height}"><title>{about}</title></rect>'
                )
            yield "</g>"
    yield "</g>"


def _joined(scene: Scene) -> Iterator[str]:
    """The actions of a rank and colour as one path."""
    table = scene.simulation.table
    yield '<g id="actions">'
    for rank in range(table.p):
        row = table.row_of(rank)
        for style, fill in enumerate(scene.fills):
            boxes = scene.bars[row][scene.styles[row] == style].tolist()
            if boxes:
                yield f'<path fill="{fill}" d="{"".join(_outline(*box) for box in boxes)}"/>'
    yield "</g>"


def _numbers(scene: Scene) -> Iterator[str]:
    if not scene.numbers.size:
        return
    size = _number(scene.number_size)
    yield f'<g id="numbers" font-size="{size}" text-anchor="middle" pointer-events="none">'
    for ink in sorted(set(scene.inks)):
        yield f'<g fill="{ink}">'
        for index in scene.numbers.tolist():
            if scene.inks[scene.styles[index]] == ink:
                x, y, width, height = scene.bars[index].tolist()
                at = f'x="{_number(x + width / 2)}" y="{_number(y + height / 2 + 0.36 * scene.number_size)}"'
                yield f"<text {at}>{scene.simulation.table.microbatches[index]}</text>"
        yield "</g>"
    yield "</g>"


def _box(box: Box) -> str:
    x, y, width, height = (_number(value) for value in box[:4])
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{box.colour}"/>'


def _outline(x: float, y: float, width: float, height: float) -> str:
    """The data of a path around a box."""
    return f"M{_number(x)} {_number(y)}h{_number(width)}v{_number(height)}h{_number(-width)}z"


def _way(line: Line) -> str:
    """The data of a path through the points; level and upright parts are short."""
    points = [(_number(x), _number(y)) for x, y in line.points]
    parts = [f"M{points[0][0]} {points[0][1]}"]
    for (before_x, before_y), (x, y) in itertools.pairwise(points):
        if x == before_x:
            parts.append(f"V{y}" if y != before_y else "")
        else:
            parts.append(f"H{x}" if y == before_y else f"L{x} {y}")
    return "".join(parts)


def _line(line: Line) -> str:
    style = f'stroke="{line.colour}" stroke-width="{_number(line.width)}"'
    return f'<path d="{_way(line)}" fill="{line.fill or "none"}" {style}/>'


def _text(text: Text) -> str:
    attributes = f'x="{_number(text.x)}" y="{_number(text.y + 0.36 * text.size)}" font-size="{_number(text.size)}"'
    attributes += f' text-anchor="{text.anchor}"' if text.anchor != "start" else ""
    attributes += ' font-weight="bold"' if text.bold else ""
    return f'<text {attributes} fill="{text.colour}">{_escaped(text.text)}</text>'


def _number(value: float) -> str:
    """At most two decimals, none that are 0."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _escaped(text: str) -> str:
    return html.escape(text, quote=False)
