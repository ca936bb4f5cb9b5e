"""``mpipipe schedule``: list the schedules, show one, convert files of tables. Needs neither torch nor MPI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mpipipe.cli.options import Json, Output, new_group
from mpipipe.cli.output import print_json
from mpipipe.cli.schedule_check import check, compare, figures_text
from mpipipe.cli.schedule_costs import Cost, CostsFile, Latency, check_costs, costs_from
from mpipipe.cli.schedule_hints import fitted, remarks
from mpipipe.cli.schedule_pictures import PICTURES, Against, Colour, check_against, picture_text, wants_colour
from mpipipe.cli.schedule_search import search
from mpipipe.cli.schedule_size import check_size, refuse_above
from mpipipe.errors import ConfigError, TableFileError

if TYPE_CHECKING:
    from mpipipe.schedule import ScheduleTable, Simulation

app = new_group("Schedule tables: which rank does what, in which order.")
app.command()(check)
app.command()(compare)
app.command()(search)

_ENDINGS = {
    ".txt": "text", ".csv": "csv", ".json": "json", ".png": "png", ".svg": "svg", ".html": "html", ".htm": "html",
    ".h5": "h5", ".hdf5": "h5",
}  # fmt: skip
_NEED_A_FILE = {"png": "a picture needs a file", "h5": "HDF5 needs a file"}
_TABLES = ("csv", "torch-csv", "torch-comms-csv", "h5")
_MOST = 1_000_000


@app.command("list")
def list_names(as_json: Json = False) -> None:
    """List the schedules that this version can build."""
    from mpipipe.schedule.registry import FAMILIES

    if as_json:
        print_json({"schedules": list(FAMILIES), "summaries": {f.name: f.summary for f in FAMILIES.values()}})
    else:
        width = max(len(name) for name in FAMILIES)
        print("\n".join(f"{family.name.ljust(width)}  {family.summary}" for family in FAMILIES.values()))


@app.command()
def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A name that 'schedule list' prints, or the file of a table (.csv, .h5).",
            show_default=False,
        ),
    ],
    ranks: Annotated[
        int | None, typer.Option("-p", "--ranks", help="Pipeline ranks.  [default: 4]", min=1, max=_MOST)
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option("-m", "--microbatches", help="Microbatches a step.  [default: 8]", min=1, max=_MOST)
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(
            "-v",
            "--chunks",
            help="Pieces of the model on each rank.  [default: 1, or what the schedule is made for]", min=1, max=_MOST,
        ),
    ] = None,
    cost: Cost = "",
    costs_file: CostsFile = None,
    latency: Latency = 0.0,
    form: Annotated[
        Literal["text", "csv", "torch-csv", "torch-comms-csv", "json", "png", "svg", "html", "h5", "chrome"] | None,
        typer.Option("--format", help="Default: by the ending of the output file, else text.", show_default=False),
    ] = None,
    output: Output = None,
    against: Against = "",
    colour: Colour = "auto",
    as_json: Json = False,
) -> None:
    """Draw a schedule and give its figures."""
    from mpipipe.schedule import draw_text, figures, simulate

    chosen = _format(form, output, as_json)
    check_against(against, chosen)
    costs = costs_from(cost, costs_file)
    told = "json" if as_json else chosen
    table = find_table(name, ranks=ranks, microbatches=microbatches, chunks=chunks, form=told)
    check_costs(table, costs, latency)
    simulation = simulate(table, costs, latency) if told not in _TABLES else None
    text = None
    if simulation is not None and chosen == "text":
        drawn = draw_text(table, simulation, colour=wants_colour(colour, output))
        text = "\n".join([fitted(drawn, output), figures_text(simulation), *remarks(table, simulation), ""])
    elif simulation is not None and chosen in PICTURES:
        text = picture_text(chosen, table, simulation, against, chunks=chunks)
    if output is None:
        print(_text(chosen, table, simulation) if text is None else text, end="", flush=True)
        return
    _write(output, chosen, table, simulation, key="-o", text=text)
    if as_json and simulation is not None:
        print_json({"written": str(output)} | figures(table, simulation))
    else:
        print(output)


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="A table: CSV, ours or torch's, or HDF5.", show_default=False)
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.", show_default=False)],
    form: Annotated[
        Literal["csv", "torch-csv", "torch-comms-csv", "h5", "json", "chrome"] | None,
        typer.Option("--format", help="Default: by the ending of OUT (.csv, .h5, .json).", show_default=False),
    ] = None,
    cost: Cost = "",
    costs_file: CostsFile = None,
    latency: Latency = 0.0,
    as_json: Json = False,
) -> None:
    """Write a table in another format; json and chrome are of its simulation, at these costs."""
    from mpipipe.schedule import simulate
    from mpipipe.schedule.exchange import load_table

    chosen = _format(form, target, as_json=False, key="OUT")
    if chosen not in (*_TABLES, "json", "chrome"):
        raise ConfigError(
            f"can't convert to {chosen}; 'mpipipe schedule show FILE' draws", key="OUT", value=str(target)
        )
    costs = costs_from(cost, costs_file)
    table = load_table(source)
    check_costs(table, costs, latency)
    refuse_above(table.num_actions, chosen)
    simulation = simulate(table, costs, latency) if chosen in ("json", "chrome") else None
    _write(target, chosen, table, simulation, key="OUT")
    if not as_json:
        print(target)
        return
    numbers = {"p": table.p, "v": table.v, "m": table.m, "lowered": table.lowered, "actions": table.num_actions}
    print_json({"written": str(target), "format": chosen, "schedule": table.name, **numbers})


def find_table(
    name: str, *, ranks: int | None = None, microbatches: int | None = None, chunks: int | None = None, form: str
) -> ScheduleTable:
    """The table of a schedule's name, or of a file; then the numbers must be those of the table, or None.

    Numbers that are not given: 4 ranks, 8 microbatches, as many chunks as the schedule is made for. Raises
    ScheduleError for an unknown name or no table, ConfigError for numbers that are not those of the file and for more
    actions than ``form`` takes.
    """
    from mpipipe.schedule import build
    from mpipipe.schedule.exchange import is_file, load_table

    if not is_file(name):
        check_size(name, form, ranks, microbatches, chunks)
        return build(name, p=ranks or 4, v=chunks, m=microbatches or 8)
    table = load_table(name)
    refuse_above(table.num_actions, form)
    for key, asked, found in (("-p", ranks, table.p), ("-m", microbatches, table.m), ("-v", chunks, table.v)):
        if asked not in (None, found):
            raise ConfigError(
                f"{asked} was asked for, the table of {name} has {found}", key=key, value=asked, allowed=str(found)
            )
    return table


def _format(form: str | None, output: Path | None, as_json: bool, *, key: str = "-o") -> str:
    if as_json and form not in (None, "json"):
        raise ConfigError(f"--json and --format {form} exclude each other", key="--format", value=form, allowed="json")
    if output is None:
        chosen = "json" if as_json else form or "text"
        if chosen in _NEED_A_FILE:
            raise ConfigError(_NEED_A_FILE[chosen], key="-o", allowed=f"-o FILE.{chosen}")
        return chosen
    if output.is_dir():
        raise ConfigError(f"'{output}' is a folder: give the name of a file", key=key, value=str(output))
    by_ending = _ENDINGS.get(output.suffix.lower())
    chosen = form or by_ending or ""
    if not chosen:
        allowed = list(_ENDINGS) if key == "-o" else [end for end, it in _ENDINGS.items() if it in (*_TABLES, "json")]
        raise ConfigError(
            f"can't tell the format of {output} from its ending", key=key, value=str(output), allowed=allowed
        )
    return chosen


def _text(form: str, table: ScheduleTable, simulation: Simulation | None) -> str:
    """The table in one of the text formats, with its line end."""
    from mpipipe.schedule import figures
    from mpipipe.schedule.exchange import chrome_text, table_text

    if simulation is None:
        return table_text(table, form)
    if form == "json":
        return json.dumps(figures(table, simulation), allow_nan=False) + "\n"
    return chrome_text(simulation) if form == "chrome" else table_text(table, form)


def _write(
    path: Path, form: str, table: ScheduleTable, simulation: Simulation | None, *, key: str, text: str | None = None
) -> None:
    """Write a format to a file, ``text`` where it is made already; a file that can't be written is the user's mistake,
    as the argument ``key``."""
    from mpipipe.schedule.draw.png import png_bytes
    from mpipipe.schedule.exchange import save_table, write_output

    try:
        if form in _TABLES:
            save_table(table, path, form)
        elif simulation is not None and form == "png":
            write_output(path, png_bytes(table, simulation), form)
        else:
            write_output(path, _text(form, table, simulation) if text is None else text, form)
    except TableFileError as error:
        raise ConfigError(error.problem, file=path, key=key, value=str(path)) from None
