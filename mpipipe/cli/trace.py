"""``mpipipe trace``: where the time of a run went. Needs neither torch nor MPI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpipipe.cli.options import Json, RunDir, new_group
from mpipipe.cli.output import print_json
from mpipipe.errors import ConfigError

app = new_group("Traces of a run: where its time went.")

_SEGMENT_HELP = "Launch of the run, from 1; default: the last that holds a step whole on all ranks."
Segment = Annotated[
    int | None,
    typer.Option("--segment", metavar="N", help=_SEGMENT_HELP, show_default=False),
]
Uncalibrated = Annotated[
    bool, typer.Option("--allow-uncalibrated", help="Take ranks whose clock was never compared with rank 0's.")
]


@app.command()
def summary(
    run_dir: RunDir, segment: Segment = None, uncalibrated: Uncalibrated = False, as_json: Json = False
) -> None:
    """Give the bubble, the waits of each rank and the costs of each stage."""
    from mpipipe.analysis import load_segment
    from mpipipe.analysis import summary as summarize
    from mpipipe.analysis.report import summary_text

    _check(run_dir)
    figures = summarize(load_segment(run_dir, segment, allow_uncalibrated=uncalibrated))
    if as_json:
        print_json(figures)
    else:
        print(summary_text(figures), end="")


@app.command()
def report(
    run_dir: RunDir,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Default: reports/ in the run folder.", show_default=False),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option("--step", help="The step to draw; default: that of median duration.", show_default=False),
    ] = None,
    segment: Segment = None,
    uncalibrated: Uncalibrated = False,
    as_json: Json = False,
) -> None:
    """Draw a step as it was and as it was simulated, and write the summary beside it."""
    from mpipipe.analysis import load_segment
    from mpipipe.analysis import report as write_report
    from mpipipe.formats.paths import RunPaths

    _check(run_dir)
    folder = RunPaths(run_dir).reports if output is None else output
    loaded = load_segment(run_dir, segment, allow_uncalibrated=uncalibrated)
    files = [str(file) for file in write_report(loaded, folder, step)]
    if as_json:
        there = [{"segment": number, "num_ranks": count} for number, count in loaded.segments.items()]
        print_json({"segment": loaded.number, "segments": there, "files": files})
    else:
        print(loaded.text(), *files, sep="\n")


def _check(run_dir: Path) -> None:
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such folder", value=str(run_dir))
