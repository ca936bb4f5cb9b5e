"""``mpipipe schedule``: list the schedules, show one. Needs neither torch nor MPI."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mpipipe.cli.options import Json, Output, new_group
from mpipipe.cli.output import print_json
from mpipipe.errors import ConfigError

if TYPE_CHECKING:
    from mpipipe.schedule import Costs, ScheduleTable, Simulation

app = new_group("Schedule tables: which rank does what, in which order.")

_ENDINGS = {".txt": "text", ".csv": "csv", ".json": "json", ".png": "png"}
_MOST = 1_000_000


@app.command("list")
def list_names(as_json: Json = False) -> None:
    """List the schedules that this version can build."""
    from mpipipe.schedule import names

    if as_json:
        print_json({"schedules": list(names())})
    else:
        print("\n".join(names()))


@app.command()
def show(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A name that 'schedule list' prints.", show_default=False)
    ],
    ranks: Annotated[int, typer.Option("-p", "--ranks", help="Pipeline ranks.", min=1, max=_MOST)] = 4,
    microbatches: Annotated[
        int, typer.Option("-m", "--microbatches", help="Microbatches a step.", min=1, max=_MOST)
    ] = 8,
    chunks: Annotated[
        int, typer.Option("-v", "--chunks", help="Pieces of the model on each rank.", min=1, max=_MOST)
    ] = 1,
    cost: Annotated[
        str, typer.Option("--cost", metavar="F=1,I=1,W=1", help="Durations of one chunk; B takes I + W.")
    ] = "",
    latency: Annotated[
        float, typer.Option("--latency", help="One way, for each hop between ranks, in the costs' unit.")
    ] = 0.0,
    form: Annotated[
        Literal["text", "csv", "torch-csv", "json", "png"] | None,
        typer.Option("--format", help="Default: by the ending of the output file, else text.", show_default=False),
    ] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Draw a schedule and give its figures."""
    from mpipipe.schedule import build, simulate

    chosen = _format(form, output, as_json)
    table = build(name, p=ranks, v=chunks, m=microbatches)
    simulation = simulate(table, parse_costs(cost), latency)
    if output is None:
        print(_text(chosen, table, simulation), end="", flush=True)
    else:
        _write(output, chosen, table, simulation)
        if not as_json:
            print(output)


def parse_costs(text: str) -> Costs:
    """Costs from ``F=1,I=1,W=1``; what is not named costs 1. Raises ConfigError."""
    from mpipipe.schedule import Costs

    costs = {"F": 1.0, "I": 1.0, "W": 1.0}
    given: set[str] = set()
    for part in text.split(",") if text else ():
        name, _, number = part.partition("=")
        name = name.strip()
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if name not in costs or name in given or not 0 <= value < float("inf"):
            raise ConfigError(f"'{part}' is no cost", key="--cost", value=text, allowed="F, I and W, as F=1,I=1,W=0.5")
        given.add(name)
        costs[name] = value
    return Costs(**costs)


def _format(form: str | None, output: Path | None, as_json: bool) -> str:
    if as_json and form not in (None, "json"):
        raise ConfigError(f"--json and --format {form} exclude each other", key="--format", value=form, allowed="json")
    if output is None:
        chosen = "json" if as_json else form or "text"
        if chosen == "png":
            raise ConfigError("a picture needs a file", key="-o", allowed="-o FILE.png")
        return chosen
    by_ending = _ENDINGS.get(output.suffix.lower())
    chosen = form or by_ending or ""
    if not chosen:
        raise ConfigError(
            f"can't tell the format of {output} from its ending", key="-o", value=str(output), allowed=list(_ENDINGS)
        )
    return chosen


def _text(form: str, table: ScheduleTable, simulation: Simulation) -> str:
    """The table in one of the text formats, with its line end."""
    from mpipipe.schedule import draw_text, figures

    if form == "json":
        return json.dumps(figures(table, simulation)) + "\n"
    if form == "text":
        return f"{draw_text(table, simulation)}\n{_figures_text(simulation)}\n"
    rows = "".join(",".join(row) + "\n" for row in table.rows())
    return rows if form == "torch-csv" else _csv_header(table) + rows


def _csv_header(table: ScheduleTable) -> str:
    placement = " ".join(str(rank) for rank in table.placement)
    lines = ("format = mpipipe-schedule", "version = 1", f"name = {table.name}", f"p = {table.p}", f"v = {table.v}")
    return "".join(f"# {line}\n" for line in (*lines, f"m = {table.m}", f"placement = {placement}"))


def _figures_text(simulation: Simulation) -> str:
    peaks = " ".join(str(peak) for peak in simulation.peak_activations.tolist())
    return (
        f"makespan {simulation.makespan:g} (no less than {simulation.lower_bound:g})  "
        f"bubble fraction {simulation.bubble_fraction:.4f}  messages {simulation.messages}\n"
        f"peak activations per rank: {peaks}"
    )


def _write(path: Path, form: str, table: ScheduleTable, simulation: Simulation) -> None:
    """Write a format to a file; a file that can't be written is the user's mistake."""
    from mpipipe.schedule import draw_png

    def write() -> None:
        if form == "png":
            draw_png(table, simulation, path)
        else:
            path.write_text(_text(form, table, simulation), encoding="utf-8")

    _as_config_error(write, path)


def _as_config_error(write: Callable[[], None], path: Path) -> None:
    try:
        write()
    except OSError as error:
        raise ConfigError(
            f"can't be written: {error.strerror or error}", file=path, key="-o", value=str(path)
        ) from None
