"""``mpipipe schedule check`` and ``compare``: is a table legal, and which of several is better. Needs neither torch nor
MPI."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mpipipe.cli.errors import EXIT_USAGE
from mpipipe.cli.options import Json
from mpipipe.cli.output import print_json, print_table
from mpipipe.cli.schedule_costs import Cost, CostsFile, Latency, costs_from
from mpipipe.cli.schedule_size import check_size, refuse_above
from mpipipe.errors import ConfigError, ScheduleError

if TYPE_CHECKING:
    from mpipipe.schedule import Costs, Problem, ScheduleTable, Sends, Simulation
    from mpipipe.schedule.exchange import LoadedTable

SHOWN = 20
"""Problems that are printed as text; ``--json`` has all."""

_FIGURES = (
    "schedule", "p", "v", "m", "stages", "placement", "rows", "costs", "latency", "makespan", "busy", "span",
    "bubble_fraction", "peak_activations", "peak_until_input_gradient", "messages", "ordered", "lower_bound",
)  # fmt: skip


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A table: CSV, ours or torch's, or HDF5.")],
    sends: Annotated[
        Literal["buffered", "rendezvous"],
        typer.Option("--sends", help="Whether a send waits for its receive; mpipipe's own do not."),
    ] = "buffered",
    receive_buffers: Annotated[
        int | None,
        typer.Option(
            "--receive-buffers", help="A send waits until its receive is among the next so many.", min=1, max=1_000_000
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say whether a table is complete, in order, and free of deadlock; exit code 2 if it is not."""
    from mpipipe.schedule import Sends, find_problems
    from mpipipe.schedule.exchange import load_with_places

    if receive_buffers is not None and sends == "rendezvous":
        raise ConfigError(
            "rendezvous sends have no receive buffers: leave one of the two out", key="--sends", value=sends
        )
    loaded = load_with_places(file)
    problems = find_problems(loaded.table)
    how = Sends(rendezvous=sends == "rendezvous", receive_buffers=receive_buffers)
    if not problems:
        problems = _stops(loaded.table, how)
    if as_json:
        print_json(_report(loaded, problems))
    else:
        print(_text(loaded, problems, how), flush=True)
    if problems:
        raise typer.Exit(EXIT_USAGE)


def _stops(table: ScheduleTable, how: Sends) -> list[Problem]:
    """The deadlock of a table that is legal but for how its sends behave."""
    from mpipipe.schedule import BUFFERED, Problem, find_deadlock

    cycle = find_deadlock(table, how) if how != BUFFERED else []
    if not cycle:
        return []
    message = f"deadlock with {how}: " + "; ".join(str(wait) for wait in cycle)
    return [Problem(cycle[0].rank, cycle[0].row, cycle[0].action, "deadlock", message)]


def _report(loaded: LoadedTable, problems: Sequence[Problem]) -> dict[str, Any]:
    from mpipipe.schedule import figures, receive_buffers_needed, simulate

    found: dict[str, Any] = {"ok": not problems, "problems": [_as_json(loaded, problem) for problem in problems]}
    if problems:
        return found | dict.fromkeys((*_FIGURES, "receive_buffers"))
    return found | figures(loaded.table, simulate(loaded.table)) | {
        "receive_buffers": receive_buffers_needed(loaded.table)
    }  # fmt: skip


def _as_json(loaded: LoadedTable, problem: Problem) -> dict[str, Any]:
    place = loaded.place(problem.rank, problem.row) if problem.rank < loaded.table.p else None
    return {
        "rank": problem.rank,
        "row": problem.row,
        "action": problem.action,
        "kind": problem.kind,
        "message": problem.message,
        "line": None if place is None else place.line,
        "cell": None if place is None else place.cell,
    }


def _text(loaded: LoadedTable, problems: Sequence[Problem], how: Sends) -> str:
    from mpipipe.schedule import receive_buffers_needed, simulate
    from mpipipe.schedule.draw.text import marked_text
    from mpipipe.units import counted

    table = loaded.table
    if not problems:
        needed = counted(receive_buffers_needed(table) or 0, "receive buffer")
        runs = "also with rendezvous sends" if needed[0] == "0" else f"needs {needed} a rank if sends wait"
        simulation = simulate(table)
        weights = "weight gradients in order" if table.ordered else "weight gradients not in microbatch order"
        weights = "no backward, as for an evaluation" if table.forward_only else weights
        return (
            f"{loaded.file}: ok with {how} ({runs}): p={table.p} v={table.v} m={table.m}, {table.num_actions} actions, "
            f"{weights}\n"
            + figures_text(simulation)
        )
    lines = [f"{loaded.where(problem.rank, problem.row)}: {problem.message}" for problem in problems[:SHOWN]]
    if len(problems) > SHOWN:
        lines.append(f"and {len(problems) - SHOWN} more (--json has all)")
    return "\n".join([*lines, marked_text(table, problems[0].rank, problems[0].row)])


def figures_text(simulation: Simulation) -> str:
    """Makespan, bound, bubble, messages and peaks in two lines."""
    peaks = " ".join(str(peak) for peak in simulation.peak_activations.tolist())
    return (
        f"makespan {simulation.makespan:g} (no less than {simulation.lower_bound:g})  "
        f"bubble fraction {simulation.bubble_fraction:.4f}  messages {simulation.messages}\n"
        f"peak activations per rank: {peaks}"
    )


def compare(
    wanted: Annotated[
        list[str], typer.Argument(metavar="NAMES", help="Schedules or files of tables; 'all' for every schedule.")
    ],
    ranks: Annotated[int, typer.Option("-p", "--ranks", help="Pipeline ranks.", min=1, max=1_000_000)] = 4,
    microbatches: Annotated[
        int, typer.Option("-m", "--microbatches", help="Microbatches a step.", min=1, max=1_000_000)
    ] = 8,
    chunks: Annotated[
        int | None,
        typer.Option("-v", "--chunks", help="Pieces of the model on each rank.", min=1, max=1_000_000,
                     show_default="what each schedule is made for"),
    ] = None,
    cost: Cost = "",
    costs_file: CostsFile = None,
    latency: Latency = 0.0,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Print the figures of several schedules side by side, the least waiting first.

    Costs are those of one chunk, so compare by the columns that do not depend on it: 'time / work' is the makespan over
    the work of the busiest rank, 'peak / v' the activations kept, in microbatches of all layers of a rank.
    """
    from mpipipe.schedule import build, names
    from mpipipe.schedule.exchange import is_file, load_table

    costs = costs_from(cost, costs_file)
    chosen = list(dict.fromkeys(each for name in wanted for each in (names() if name == "all" else (name,))))
    found = []
    for name in chosen:
        try:
            check_size(name, "compare", ranks, microbatches, chunks)
            table = load_table(name) if is_file(name) else build(name, p=ranks, v=chunks, m=microbatches)
            refuse_above(table.num_actions, "compare")
        except ScheduleError as error:
            if len(chosen) == 1 or name.partition(":")[0] not in names():
                raise
            found.append({"schedule": name, "refused": str(error)})
            continue
        found.append(_compared(name, table, costs, latency))
    if as_json:
        print_json({"schedules": found})
        return
    good = sorted((one for one in found if "refused" not in one), key=lambda one: one["time_over_work"])
    print_table(_HEADS, [_line(one) for one in good])
    for one in found:
        if "refused" in one:
            print(f"{one['schedule']}: {one['refused']}")


_HEADS = ("schedule", "v", "makespan", "/ bound", "time / work", "bubble", "peak / v", "until I", "messages", "ordered")


def _compared(name: str, table: ScheduleTable, costs: Costs, latency: float) -> dict[str, Any]:
    """The figures of a table without its rows, and makespan over bound and over work."""
    from mpipipe.schedule import figures, simulate

    simulation = simulate(table, costs, latency)
    one = figures(table, simulation, rows=False)
    time = simulation.makespan
    over = {"over_bound": simulation.lower_bound, "time_over_work": float(simulation.busy.max(initial=0.0))}
    return one | {"schedule": name} | {key: time / least if least else 1.0 for key, least in over.items()}


def _line(one: dict[str, Any]) -> tuple[str, ...]:
    v = one["v"]
    return (
        one["schedule"],
        str(v),
        f"{one['makespan']:g}",
        f"{one['over_bound']:.3f}",
        f"{one['time_over_work']:.3f}",
        f"{one['bubble_fraction']:.4f}",
        _range([peak / v for peak in one["peak_activations"]]),
        _range([peak / v for peak in one["peak_until_input_gradient"]]),
        str(one["messages"]),
        "yes" if one["ordered"] else "no",
    )


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{high:g}" if low == high else f"{low:g}..{high:g}"
