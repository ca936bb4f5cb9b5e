"""What ``mpipipe schedule show`` needs for its pictures: colours on a terminal, a second schedule beside the first."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mpipipe.errors import ConfigError

if TYPE_CHECKING:
    from mpipipe.schedule import Costs, ScheduleTable, Shown, Simulation

PICTURES = ("svg", "html")
"""Pictures that are text."""

Colour = Annotated[
    Literal["auto", "always", "never"],
    typer.Option("--colour", "--color", help="Colours in the text form; auto: on a terminal, unless NO_COLOR is set."),
]
Against = Annotated[
    str,
    typer.Option(
        "--against", metavar="NAME", help="Another schedule, or file, below it in the html form.", show_default=False
    ),
]


def wants_colour(choice: str, output: Path | None) -> bool:
    """Whether the text is coloured: as asked, else on a terminal that is not dumb, unless NO_COLOR is set."""
    if choice != "auto":
        return choice == "always"
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return output is None and not plain and sys.stdout is not None and sys.stdout.isatty()


def check_against(against: str, form: str) -> None:
    """Raises ConfigError where ``--against`` is given for another form than html."""
    if against and form != "html":
        raise ConfigError(
            f"two schedules stand in one picture in the html form only, not in {form}",
            key="--against",
            value=against,
            allowed="--format html, or -o FILE.html",
        )


def picture_text(
    form: str,
    table: ScheduleTable,
    simulation: Simulation,
    against: str = "",
    *,
    chunks: int | None = None,
) -> str:
    """The text of an SVG file or of an HTML page."""
    from mpipipe.schedule import Shown, html_text, svg_text

    if form == "svg":
        return svg_text(table, simulation)
    shown = [Shown(table, simulation)]
    return html_text([*shown, _beside(against, table, simulation, chunks)] if against else shown)


def _beside(name: str, table: ScheduleTable, simulation: Simulation, chunks: int | None) -> Shown:
    """The second schedule, with the first's p and m, latency, and costs that make its model as large.

    It has as many chunks as asked for where its family takes any number, else those it is made for.
    """
    from mpipipe.schedule import Shown, build, simulate
    from mpipipe.schedule.exchange import is_file, load_table
    from mpipipe.schedule.registry import family_of

    if is_file(name):
        other = load_table(name)
    else:
        free = family_of(name)[0].chunks is None
        other = build(name, p=table.p, v=chunks if free else None, m=table.m)
    size = table.num_stages / other.num_stages
    note = "" if size == 1 else f"a chunk is {size:g} of one above"
    return Shown(other, simulate(other, _scaled(simulation.costs, size), simulation.latency), note)


def _scaled(costs: Costs, size: float) -> Costs:
    if size == 1:
        return costs
    return replace(costs, **{kind: getattr(costs, kind) * size for kind in ("F", "I", "W")})
