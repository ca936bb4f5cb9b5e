"""``mpipipe schedule search``: the best table for given costs under a cap on activations. No torch, no MPI."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mpipipe.cli.options import Json, Output
from mpipipe.cli.output import print_json, print_table
from mpipipe.cli.progress import counted_progress
from mpipipe.cli.schedule_costs import Cost, CostsFile, Latency, costs_from, shortened
from mpipipe.errors import ConfigError, TableFileError

if TYPE_CHECKING:
    from mpipipe.schedule.search import SearchResult

_MOST = 1_000_000
_TABLE_ENDINGS = (".csv", ".h5", ".hdf5")
_Ranks = Annotated[int, typer.Option("-p", "--ranks", help="Pipeline ranks.", min=1, max=_MOST)]
_Microbatches = Annotated[int, typer.Option("-m", "--microbatches", help="Microbatches a step.", min=1, max=_MOST)]
_Chunks = Annotated[
    int | None,
    typer.Option("-v", "--chunks", help="Pieces of the model on each rank.  [default: 1]", min=1, max=_MOST),
]
_Memory = Annotated[
    str,
    typer.Option(
        "--memory",
        metavar="N|N,N,...",
        help="Most activations, of one chunk and microbatch, that a rank keeps until their W; one number or one a "
        "rank.  [default: no cap]",
        show_default=False,
    ),
]
_Split = Annotated[bool, typer.Option("--split/--no-split", help="Whether the backward may be split into I and W.")]
_Effort = Annotated[
    int, typer.Option("--effort", help="How much local search; the time grows with it.", min=0, max=10_000)
]
_Seed = Annotated[int, typer.Option("--seed", help="Of the local search.")]
_Top = Annotated[int, typer.Option("--top", metavar="K", help="How many of those tried are listed.", min=1)]


def search(
    ranks: _Ranks = 4,
    microbatches: _Microbatches = 8,
    chunks: _Chunks = None,
    cost: Cost = "",
    costs_file: CostsFile = None,
    latency: Latency = 0.0,
    memory: _Memory = "",
    split: _Split = True,
    effort: _Effort = 1,
    seed: _Seed = 0,
    top: _Top = 5,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Search the shortest table for these costs under a cap, and prove how far from the best it is at most.

    Tries every family with its options, then list schedules, then local search. Stages lie on the ranks in a loop or
    zig-zag, with --latency also v neighbours to a rank; the proof is for these placements. -o saves the table (.csv,
    .h5).
    """
    from mpipipe.schedule.exchange import save_table
    from mpipipe.schedule.search import search as find

    if output is not None and output.suffix.lower() not in _TABLE_ENDINGS:
        raise ConfigError("a table is saved as CSV or HDF5", key="-o", value=str(output), allowed=list(_TABLE_ENDINGS))
    costs = costs_from(cost, costs_file)
    cap = parse_memory(memory)
    with counted_progress("search") as count:
        result = find(
            p=ranks,
            m=microbatches,
            v=chunks,
            costs=costs,
            latency=latency,
            cap=cap,
            split=split,
            seed=seed,
            effort=effort,
            tell=lambda share: count(int(share * 1000), 1000),
        )
    if output is not None:
        try:
            save_table(result.table, output)
        except TableFileError as error:
            raise ConfigError(error.problem, file=output, key="-o", value=str(output)) from None
    if as_json:
        print_json(search_figures(result) | ({} if output is None else {"written": str(output)}))
        return
    _print(result, top)
    if output is not None:
        print(output)


def parse_memory(text: str) -> int | list[int] | None:
    """A cap from ``N`` or ``N,N,...``; None for an empty text. Raises ConfigError."""
    if not text:
        return None
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not re.fullmatch("[0-9]{1,7}", part) or not 0 < int(part) <= _MOST]
    if wrong:
        raise ConfigError(
            f"{shortened(wrong[0])} is no cap",
            key="--memory",
            value=text,
            allowed=f"whole numbers from 1 to {_MOST}, one or one a rank, as 8 or 8,7,6,5",
        )
    return int(parts[0]) if len(parts) == 1 else [int(part) for part in parts]


def search_figures(result: SearchResult) -> dict[str, Any]:
    """The figures of the table as ``schedule show --json`` gives them, ``lower_bound`` that of the search with its cap;
    ``found_by``, ``gap``, ``placements`` (for which the bound holds) and ``tried``."""
    from mpipipe.schedule import figures

    found = figures(result.table, result.simulation)
    found.update(
        lower_bound=result.lower_bound,
        gap=result.gap,
        placements=list(result.placements),
        found_by=result.found_by,
        tried=[one._asdict() for one in result.tried],
    )
    return found


def _print(result: SearchResult, top: int) -> None:
    shown = []
    seen = set()
    for one in result.tried:
        if one.makespan is None or one.reason or (one.makespan, one.peak) in seen:
            continue
        seen.add((one.makespan, one.peak))
        over = one.makespan / result.lower_bound - 1 if result.lower_bound else 0.0
        shown.append((one.name, f"{one.makespan:g}", f"{100 * over:.1f} %", one.peak))
    print_table(("found by", "makespan", "over the bound", "peak"), shown[:top])
    peaks = " ".join(str(peak) for peak in result.simulation.peak_activations.tolist())
    *first, last = result.placements
    where = f"on the {', '.join(first)} or {last} placement" if first else f"on the {last} placement"
    proof = f"no table {where} is shorter" + (f" than {result.lower_bound:g}" if result.gap else "")
    print(
        f"best: {result.found_by}\nmakespan {result.simulation.makespan:g}  gap {100 * result.gap:.1f} % ({proof})  "
        f"bubble fraction {result.simulation.bubble_fraction:.3f}\nactivations kept at once, by rank: {peaks}"
    )
