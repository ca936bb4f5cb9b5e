"""The Typer application: the tree of verbs, and how every run of it ends."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import mpipipe
from mpipipe.cli import bench, checkpoint, data, doctor, generate, plan, schedule, trace, train
from mpipipe.cli.errors import EXIT_FAILURE, EXIT_USAGE, report
from mpipipe.environment import launcher

# Typer has its own copy of click, or uses click, by its version; the class of every usage error is this one in both.
_UsageError: Any = typer.BadParameter.__mro__[1]


def _version(asked: bool) -> None:
    if asked:
        print(f"mpipipe {mpipipe.__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Pipeline-parallel training of transformers over MPI ranks."""


def build_app() -> typer.Typer:
    """The whole tree of verbs."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        callback=_root,
    )
    train.add_to(app)
    generate.add_to(app)
    plan.add_to(app)
    app.add_typer(schedule.app, name="schedule")
    app.add_typer(trace.app, name="trace")
    app.add_typer(checkpoint.app, name="checkpoint")
    app.add_typer(data.app, name="data")
    app.add_typer(bench.app, name="bench")
    doctor.add_to(app)
    return app


def run(argv: Sequence[str] | None = None) -> int:
    """Run a verb and return the exit code; every error ends here and is told once."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments
    try:
        command = typer.main.get_command(build_app())
        result = command.main(args=arguments, prog_name="mpipipe", standalone_mode=False)
    except _UsageError as error:
        return _usage(error, as_json)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return EXIT_FAILURE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except Exception as error:
        return report(error, as_json=as_json)
    return result if isinstance(result, int) else 0


def _usage(error: Any, as_json: bool) -> int:
    """Tell of a wrong command line, from one rank of a launch only."""
    if launcher().rank not in (None, 0):
        return EXIT_USAGE
    if as_json:
        said = {"type": "UsageError", "message": error.format_message(), "key": None, "allowed": None}
        print(json.dumps({"error": said}), flush=True)
    else:
        error.show()
    return EXIT_USAGE
