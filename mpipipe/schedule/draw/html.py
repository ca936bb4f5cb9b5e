"""One HTML page, complete in itself, to pan, zoom and hover over one schedule or two on the same time axis.

The scripts and the style are the files ``page_*.js`` and ``page.css`` beside this one. Names come from files that
anybody may have made: they stand in the page as escaped text and as JSON, and the page's policy lets only its own
scripts run and nothing be loaded. Letters: p = num_ranks, A = number of actions.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpipipe.errors import ScheduleError
from mpipipe.schedule.action import Kind
from mpipipe.schedule.critical_path import critical_path
from mpipipe.schedule.draw import colours
from mpipipe.schedule.draw.scene import numbered_chunks
from mpipipe.schedule.draw.words import costs_words, figures_words, printable, shortened
from mpipipe.schedule.phases import phase_bounds
from mpipipe.schedule.simulate import Simulation
from mpipipe.schedule.table import ScheduleTable

MOST_ACTIONS = 200_000
"""Actions of a page, over its schedules."""

_SCRIPTS = ("page_data.js", "page_view.js", "page_input.js")
_TICKS = 2**24
_HELP = (
    "Wheel or pinch: zoom in time at the pointer. Drag: move. Shift and wheel: move in time. Alt and wheel, or [ and "
    "]: height of the ranks. Wheel over the names of the ranks: scroll. + - and 0: zoom, and all of it. Arrows, Page "
    "Up and Page Down: move. c: critical path. m: activations kept. Under the pointer: the action, its times, and "
    "what it waited for."
)


class Shown(NamedTuple):
    """A schedule on a page. ``note`` stands under the name: what is to be known of its costs."""

    table: ScheduleTable
    simulation: Simulation
    note: str = ""


def html_text(shown: Sequence[Shown]) -> str:
    """The page of one schedule, or of several one above the other, on one time axis.

    Raises ScheduleError for more than 200,000 actions in all.
    """
    total = sum(one.simulation.table.num_actions for one in shown)
    if total > MOST_ACTIONS:
        raise ScheduleError(
            f"{total} actions are too many for a page of at most {MOST_ACTIONS}: take a smaller p, v or m"
            + (", or one schedule a page" if len(shown) > 1 else "")
        )
    return "\n".join(_page(shown)) + "\n"


def _page(shown: Sequence[Shown]) -> Iterator[str]:
    kinds = _kinds(shown)
    script = "(() => {\n'use strict';\n" + "\n".join(_file(name) for name in _SCRIPTS) + "})();\n"
    style = _file("page.css") + "\n".join(_style_rules()) + "\n"
    title = html.escape(" and ".join(shortened(printable(one.table.name), 80) for one in shown))
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'"
    yield "<!DOCTYPE html>"
    yield '<html lang="en">'
    yield "<head>"
    yield '<meta charset="utf-8">'
    yield '<meta name="generator" content="mpipipe">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{title}</title>"
    yield f"<style>{style}</style>"
    yield "</head>"
    yield "<body>"
    yield f"<header><h1>{title}</h1>"
    yield from _table(shown)
    yield "</header>"
    yield from _bar(shown, kinds)
    yield f"<details><summary>Mouse and keys</summary>{html.escape(_HELP)}</details>"
    yield (
        '<canvas id="picture" tabindex="0" role="img" aria-label="A bar for each rank, time from left to right; the '
        'figures are in the table above">This page needs a browser with canvas and scripts.</canvas>'
    )
    yield '<div id="tip" role="status" hidden></div>'
    yield f'<script type="application/json" id="data">{_json(_data(shown))}</script>'
    yield f"<script>{script}</script>"
    yield "</body>"
    yield "</html>"


def _file(name: str) -> str:
    return resources.files("mpipipe.schedule.draw").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """The source expression that allows exactly this inline text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _json(value: Any) -> str:
    """JSON that can stand in a script element: no text in it ends the element or begins a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _kinds(shown: Sequence[Shown]) -> list[Kind]:
    return [kind for kind in colours.STYLES if any(np.any(one.simulation.table.kinds == kind) for one in shown)]


def _style_rules() -> Iterator[str]:
    """The colours of the legend."""
    for kind, style in colours.STYLES.items():
        yield f".{kind.name}0 {{ background: {style.light}; }}"
        yield f".{kind.name}1 {{ background: {style.dark}; }}"
        yield f".{kind.name} {{ background: {colours.fill(kind, 0, 1)}; }}"
    for phase, colour in colours.PHASE_COLOURS.items():
        yield f".phase{int(phase)} {{ background: {colour}; }}"
    yield f".memory {{ background: {colours.MEMORY_FILL}; border-top: 1px solid {colours.MEMORY_LINE}; }}"


_HEADS = (
    "schedule", "p", "v", "m", "makespan", "lower bound", "makespan / bound", "bubble fraction",
    "peak activations", "messages", "ordered", "actions", "costs of a chunk",
)  # fmt: skip


def _table(shown: Sequence[Shown]) -> Iterator[str]:
    yield '<div class="wide"><table>'
    yield "<thead><tr>" + "".join(f"<th>{head}</th>" for head in _HEADS) + "</tr></thead>"
    yield "<tbody>"
    for one in shown:
        table, simulation = one.table, one.simulation
        bound, peaks = simulation.lower_bound, simulation.peak_activations
        cells = (
            printable(table.name),
            table.p,
            table.v,
            table.m,
            f"{simulation.makespan:g}",
            f"{bound:g}",
            f"{simulation.makespan / bound:.3f}" if bound > 0 else "",
            f"{simulation.bubble_fraction:.4f}",
            f"{peaks.min()} to {peaks.max()}" if peaks.min() < peaks.max() else f"{peaks.max()}",
            simulation.messages,
            "yes" if simulation.table.ordered else "no",
            simulation.table.num_actions,
            costs_words(simulation) + (f" ({one.note})" if one.note else ""),
        )
        yield "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>"
    yield "</tbody></table></div>"


def _bar(shown: Sequence[Shown], kinds: list[Kind]) -> Iterator[str]:
    """Buttons and legend."""
    yield '<div class="bar">'
    for name, text, label in (
        ("zoom-in", "+", "Zoom in"),
        ("zoom-out", "−", "Zoom out"),
        ("fit", "all", "Show all of it"),
        ("taller", "taller", "Taller ranks"),
        ("lower", "lower", "Lower ranks"),
    ):
        yield f'<button type="button" id="{name}" title="{label}">{text}</button>'
    for name, text in (("path", "critical path"), ("memory", "activations kept")):
        yield f'<label class="key"><input type="checkbox" id="show-{name}" checked><i class="{name}"></i>{text}</label>'
    counts = [numbered_chunks(one.simulation.table)[1] for one in shown]
    mirrored = any(one.simulation.table.mirror is not None for one in shown)
    for kind in kinds:
        swatches = f'<i class="{kind.name}"></i>'
        if max(counts) > 1:
            swatches = f'<i class="{kind.name}0"></i><i class="{kind.name}1{" mirrored" if mirrored else ""}"></i>'
        yield f'<span class="key">{swatches}{colours.STYLES[kind].name}</span>'
    yield '<span class="key"><i class="idle"></i>waiting</span>'
    for phase in colours.PHASE_COLOURS:
        yield f'<span class="key"><i class="phase phase{int(phase)}"></i>{phase.title}</span>'
    if mirrored:
        yield "<span>light: first copy of a stage; dark, with a stripe: second copy</span>"
    elif max(counts) > 1:
        yield "<span>light to dark: first to last chunk of a rank</span>"
    yield "</div>"


def _data(shown: Sequence[Shown]) -> dict[str, Any]:
    return {
        "version": 1,
        "phases": list(colours.PHASE_COLOURS.values()),
        "memory": [colours.MEMORY_FILL, colours.MEMORY_LINE],
        "schedules": [_schedule(one) for one in shown],
    }


def _schedule(one: Shown) -> dict[str, Any]:
    """The columns of a schedule, for ``page_data.js``.

    Times are whole ticks: ``wait`` from the end of the action before on the rank, and how long it ``lasts``; the flat
    places in ``pairs`` and ``path`` are differences.
    """
    simulation, table = one.simulation, one.simulation.table
    tick = tick_of(simulation)
    start, end = (np.rint(times / tick).astype(np.int64) for times in (simulation.start, simulation.end))
    before = np.zeros_like(end)
    before[1:] = end[:-1]
    before[table.offsets[:-1][np.diff(table.offsets) > 0]] = 0
    chunks, count = numbered_chunks(table)
    codes, styles = np.unique(table.kinds * np.int64(count) + chunks, return_inverse=True)
    return {
        "name": printable(one.table.name),
        "figures": figures_words(simulation) + (f"; {one.note}" if one.note else ""),
        "note": one.note,
        "p": table.p,
        "m": table.m,
        "tick": tick,
        "makespan": round(simulation.makespan / tick),
        "styles": [_style(Kind(code // count), code % count, count, table) for code in codes.tolist()],
        "offsets": table.offsets.tolist(),
        "style": styles.tolist(),
        "stage": table.stages.tolist(),
        "microbatch": table.microbatches.tolist(),
        "wait": (start - before).tolist(),
        "lasts": (end - start).tolist(),
        "pairs": _steps(table.overlaps),
        "path": _steps(critical_path(simulation)),
        "phases": np.rint(phase_bounds(simulation) / tick).astype(np.int64).tolist(),
    }


def _style(kind: Kind, chunk: int, count: int, table: ScheduleTable) -> dict[str, Any]:
    mirrored = table.mirror is not None and chunk >= count // 2
    place = f"chunk {chunk - count // 2 if mirrored else chunk}"
    return {
        "kind": int(kind),
        "letter": kind.name,
        "title": colours.STYLES[kind].name,
        "fill": colours.fill(kind, chunk, count),
        "ink": colours.STYLES[kind].ink,
        "place": place + (" of the second copy" if mirrored else ""),
        "mirrored": mirrored,
    }


def _steps(places: NDArray[np.int64]) -> list[int]:
    steps: list[int] = np.diff(places, prepend=0).tolist()
    return steps


def tick_of(simulation: Simulation) -> float:
    """The time of one tick: the largest of which all starts and ends are multiples where they are decimals of at most 6
    places, else a 2**24th of the makespan, finer than any picture."""
    times = np.unique(np.concatenate((simulation.start, simulation.end)))
    for decimals in range(7):
        scaled = times * 10.0**decimals
        whole = np.rint(scaled)
        if whole.max(initial=0.0) > 2.0**40:
            break
        if np.all(np.abs(scaled - whole) < 1e-6):
            largest = int(np.gcd.reduce(whole.astype(np.int64), initial=0))
            return max(1, largest) / 10.0**decimals
    return simulation.makespan / _TICKS if simulation.makespan > 0 else 1.0
