"""A scene as PNG. matplotlib is loaded when something is drawn."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpipipe.errors import MissingDependencyError
from mpipipe.schedule.draw import colours
from mpipipe.schedule.draw.colours import shade
from mpipipe.schedule.draw.scene import Box, Line, Scene, Text, compose
from mpipipe.schedule.simulate import Simulation
from mpipipe.schedule.table import ScheduleTable

__all__ = ["draw_png", "png_bytes", "shade"]

_PIXELS = 1.5
"""Pixels of the file for one of the scene."""

_INCH = 96.0
_POINT = 72.0 / _INCH


def draw_png(table: ScheduleTable, simulation: Simulation, path: Path | str) -> None:
    """Write what ``png_bytes`` gives to ``path``, whatever is there. Raises OSError too."""
    Path(path).write_bytes(png_bytes(table, simulation))


def png_bytes(table: ScheduleTable, simulation: Simulation) -> bytes:
    """A picture as the bytes of a PNG file: a bar a rank, time from left to right, colour by kind, darker for higher
    chunks, microbatch numbers where they fit; the phases in a strip above each bar, the activations kept below it,
    the critical path framed.

    Raises ScheduleError for more than 100,000 actions and MissingDependencyError without matplotlib.
    """
    scene = compose(table, simulation)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("drawing a PNG needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(scene.width / _INCH, scene.height / _INCH), dpi=_INCH * _PIXELS)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, scene.width)
    axes.set_ylim(scene.height, 0)
    _boxes(axes, scene.back, 1)
    for line in scene.curves:
        _curve(axes, line)
    _bars(axes, scene)
    _boxes(axes, scene.stripes, 4)
    _numbers(axes, scene)
    _path(axes, scene)
    for text in scene.texts:
        _text(axes, text)
    made = io.BytesIO()
    figure.savefig(made, format="png", metadata={"Software": "mpipipe"})
    return made.getvalue()


def _corners(x: float, y: float, width: float, height: float) -> list[tuple[float, float]]:
    return [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]


def _boxes(axes: Any, boxes: Sequence[Box], layer: int) -> None:
    from matplotlib.collections import PolyCollection

    if boxes:
        places = [_corners(*box[:4]) for box in boxes]
        axes.add_collection(
            PolyCollection(places, facecolors=[box.colour for box in boxes], linewidths=0, zorder=layer)
        )


def _curve(axes: Any, line: Line) -> None:
    x, y = zip(*line.points, strict=True)
    if line.fill is not None:
        axes.fill(x, y, facecolor=line.fill, linewidth=0, zorder=2)
    axes.plot(x, y, color=line.colour, linewidth=line.width * _POINT, zorder=2)


def _bars(axes: Any, scene: Scene) -> None:
    from matplotlib.collections import PolyCollection

    if not scene.bars.size:
        return
    x, y, width, height = scene.bars.T
    places = np.stack((x, y, x + width, y, x + width, y + height, x, y + height), axis=1).reshape(-1, 4, 2)
    edge: dict[str, Any] = {"edgecolors": "white", "linewidths": scene.edges * _POINT}
    if not scene.edges:
        edge = {"linewidths": 0, "antialiaseds": False}  # smoothed, the background would show between neighbours
    fills = np.array(scene.fills)[scene.styles]
    axes.add_collection(PolyCollection(list(places), facecolors=fills, zorder=3, **edge))


def _numbers(axes: Any, scene: Scene) -> None:
    for index in scene.numbers.tolist():
        x, y, width, height = scene.bars[index].tolist()
        ink = scene.inks[scene.styles[index]]
        number = str(scene.simulation.table.microbatches[index])
        _text(axes, Text(x + width / 2, y + height / 2, number, scene.number_size, "middle", ink))


def _path(axes: Any, scene: Scene) -> None:
    """The critical path, black on white so that it shows on light and dark."""
    from matplotlib.collections import LineCollection, PolyCollection

    frames = [_corners(*frame) for frame in scene.frames]
    links = [line.points for line in scene.links]
    for colour, width, layer in ((colours.HALO, scene.halo, 6), (colours.PATH, scene.stroke, 7)):
        style: dict[str, Any] = {"edgecolors": colour, "linewidths": width * _POINT, "zorder": layer}
        axes.add_collection(PolyCollection(frames, facecolors="none", joinstyle="miter", **style))
        axes.add_collection(LineCollection(links, **style))


def _text(axes: Any, text: Text) -> None:
    axes.text(
        text.x,
        text.y,
        text.text,
        fontsize=text.size * _POINT,
        ha={"start": "left", "middle": "center", "end": "right"}[text.anchor],
        va="center_baseline",
        color=text.colour,
        fontweight="bold" if text.bold else "normal",
        parse_math=False,
        zorder=8,
    )
