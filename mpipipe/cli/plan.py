"""``mpipipe plan``: what a run will look like before it runs. Needs neither torch nor MPI."""

from __future__ import annotations

from typing import Annotated

import typer

from mpipipe.cli.options import Json, RunFile, Settings
from mpipipe.cli.output import print_json
from mpipipe.errors import ConfigError


def add_to(app: typer.Typer) -> None:
    """Put the verb into the tree."""
    app.command()(plan)


def plan(
    run_file: RunFile,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", metavar="N", help="Default: pipeline.ranks of the run file.", min=1, show_default=False
        ),
    ] = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Say how a run file's model is cut and how busy the ranks will be."""
    from mpipipe.config import Config
    from mpipipe.planner import plan as make_plan

    given = [*(settings or ()), *([] if ranks is None else [f"pipeline.ranks={ranks}"])]
    config = Config.load(run_file, given)
    number = config.pipeline.ranks
    if number is None:
        raise ConfigError(
            "pipeline.ranks is not set, so the number of ranks is not known: give --ranks N, or set pipeline.ranks",
            file=run_file,
            key="pipeline.ranks",
        )
    config.needed_model(run_file)
    report = make_plan(config.resolve(number, run_file, given), number)
    if as_json:
        print_json(report.figures())
    else:
        print(report)
