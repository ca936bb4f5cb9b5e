"""``mpipipe train`` and ``mpipipe eval``: the verbs that run on every rank of an MPI launch."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from mpipipe.cli.errors import message
from mpipipe.cli.log_handlers import logging_to
from mpipipe.cli.options import Json, RunFile, Settings
from mpipipe.cli.output import print_json
from mpipipe.cli.progress import is_step, step_progress
from mpipipe.cli.ranks import on_ranks
from mpipipe.errors import ConfigError, ScheduleError
from mpipipe.log import LogContext

if TYPE_CHECKING:
    from mpipipe.config import Config
    from mpipipe.transport import Transport

T = TypeVar("T")
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume", metavar="auto|never|PATH", help="In place of the run file's run.resume.", show_default=False
    ),
]


def add_to(app: typer.Typer) -> None:
    """Put the verbs into the tree."""
    app.command()(train)
    app.command("eval")(evaluate)


def train(run_file: RunFile, settings: Settings = None, resume: Resume = None, as_json: Json = False) -> None:
    """Train a model over all ranks.

    Start it on every rank: mpirun -n 4 mpipipe train RUN.toml
    """

    def work(config: Config, transport: Transport) -> int:
        return _train(config, transport, resume, as_json)

    def prepare(num_ranks: int) -> Config:
        _check_resume(resume)
        command = _command("train", run_file, settings, *_rest(resume))
        return prepare_config(run_file, settings, num_ranks, "data.train", command=command)

    raise typer.Exit(on_ranks(prepare, work, as_json=as_json))


def evaluate(run_file: RunFile, settings: Settings = None, resume: Resume = None, as_json: Json = False) -> None:
    """Loss over the validation tokens.

    With the weights of the newest checkpoint; changes nothing.
    """

    def work(config: Config, transport: Transport) -> int:
        return _evaluate(config, transport, resume, as_json)

    def prepare(num_ranks: int) -> Config:
        _check_resume(resume)
        command = _command("eval", run_file, settings, *_rest(resume))
        return prepare_config(run_file, settings, num_ranks, "data.validation", command=command)

    raise typer.Exit(on_ranks(prepare, work, as_json=as_json))


def _rest(resume: str | None) -> list[str]:
    return [] if resume is None else ["--resume", resume]


def _check_resume(resume: str | None) -> None:
    from mpipipe.config import is_path

    if resume is not None and not is_path(resume):
        problem = "is empty, too long for a path, or holds a control character"
        raise ConfigError(problem, file="--resume", key="run.resume", value=resume, allowed="auto, never, or a path")


def prepare_config(
    run_file: Path, settings: list[str] | None, num_ranks: int, *needed: str, command: str = ""
) -> Config:
    """The run file's config for ``num_ranks`` ranks; the same or the same ConfigError, with all faults that are found,
    on every rank. ``command``: what was started, for the messages.
    """
    from mpipipe.config import Config, joined

    config = Config.load(run_file, settings or ())
    keys = {text.partition("=")[0].strip() for text in settings or ()}
    found: list[ConfigError] = []

    def check(action: Callable[[], T]) -> T | None:
        try:
            return action()
        except ConfigError as error:
            found.append(error)
            return None

    check(lambda: config.require(*needed, file=Path("--set") if keys & set(needed) else run_file))
    check(lambda: config.needed_model(run_file))
    command = command or _command("train", run_file)
    resolved = check(lambda: config.resolve(num_ranks, run_file, settings or (), command))
    ranks = num_ranks if resolved else config.pipeline.ranks or num_ranks
    file = Path("--set") if keys & {"pipeline.schedule", "pipeline.chunks"} else run_file
    check(lambda: _check_schedule(config, ranks, file))
    if found or resolved is None:
        raise joined(found)
    return resolved


def _command(verb: str, run_file: Path, settings: list[str] | None = None, *more: str) -> str:
    """The command line that was given, to be given again."""
    given = [part for setting in settings or () for part in ("--set", setting)]
    return shlex.join(["mpipipe", verb, str(run_file), *given, *more])


def _check_schedule(config: Config, ranks: int, file: Path) -> None:
    """Raise ConfigError unless there is a table of ``pipeline.schedule`` that this version trains with."""
    from mpipipe.config import unknown_schedule
    from mpipipe.planner import AUTO
    from mpipipe.schedule import names
    from mpipipe.schedule.exchange import is_file, table_named

    pipeline = config.pipeline
    if pipeline.schedule == AUTO:
        return
    family = pipeline.schedule.partition(":")[0]
    if family not in names() and not is_file(pipeline.schedule):
        raise unknown_schedule(pipeline.schedule, (*names(), AUTO), file)
    try:
        table = table_named(pipeline.schedule, p=ranks, v=pipeline.chunks, m=config.num_microbatches)
    except ScheduleError as error:
        raise ConfigError(message(error), file=file, key="pipeline.schedule", value=pipeline.schedule) from None
    if table.mirror is not None:
        raise ConfigError(
            "keeps every stage on two ranks: this version draws and simulates such schedules, and trains with none",
            file=file,
            key="pipeline.schedule",
            value=pipeline.schedule,
            allowed="a schedule with one copy of each stage, as zb-v or dualpipe-v",
        )


def _train(config: Config, transport: Transport, resume: str | None, as_json: bool) -> int:
    from mpipipe.formats.paths import RunPaths
    from mpipipe.trainer import train_run

    context = _log_context(config, transport)
    with ExitStack() as stack:
        stack.enter_context(logging_to(context, RunPaths(config.run_dir).log(transport.rank)))
        show = None
        if transport.rank == 0:
            _advise(config)
            # Standard error says whether a person watches: Open MPI gives ranks a terminal as standard output, always.
            watched = sys.stderr.isatty()
            stream = sys.stderr if as_json or watched else sys.stdout
            show = stack.enter_context(step_progress(config.log.every_steps, stream, bar=watched))

        def report(figures: Mapping[str, object]) -> None:
            step = figures.get("step")
            if is_step(figures) and isinstance(step, int):
                context.step = step
            if show is not None:
                show(figures)

        outcome = train_run(config, transport, resume=resume, report=report)
    if transport.rank == 0:
        figures = asdict(outcome) | {"checkpoint": None if outcome.checkpoint is None else str(outcome.checkpoint)}
        if as_json:
            print_json({"run_dir": str(config.run_dir), **figures})
        else:
            print(_end_text(figures), flush=True)
    return outcome.exit_code


def _end_text(figures: Mapping[str, object]) -> str:
    how = "done" if figures["exit_code"] == 0 else "stopped before run.time_limit, start it again to go on"
    parts = [f"{how}: step {figures['step']}"]
    for key, name in (("loss", "loss"), ("validation_loss", "validation loss")):
        value = figures[key]
        if isinstance(value, float):
            parts.append(f"{name} {value:.4f}")
    if figures["skipped_steps"]:
        parts.append(f"{figures['skipped_steps']} steps of this launch changed nothing (metrics.jsonl says why)")
    if figures["checkpoint"] is not None:
        parts.append(f"saved in {figures['checkpoint']}")
    return ", ".join(parts)


def _evaluate(config: Config, transport: Transport, resume: str | None, as_json: bool) -> int:
    from mpipipe.trainer import eval_run

    with logging_to(_log_context(config, transport)):
        figures = eval_run(config, transport, resume=resume)
    if transport.rank == 0:
        if as_json:
            print_json(figures)
        else:
            print("  ".join(f"{key} {value}" for key, value in figures.items()), flush=True)
    return 0


def _log_context(config: Config, transport: Transport) -> LogContext:
    from mpipipe.planner import AUTO
    from mpipipe.schedule.exchange import table_named
    from mpipipe.topology import stages_on

    pipeline = config.pipeline
    if pipeline.schedule == AUTO:  # the search says it later
        return LogContext(rank=transport.rank, stages=AUTO)
    table = table_named(pipeline.schedule, p=transport.size, v=pipeline.chunks, m=config.num_microbatches)
    stages = stages_on(table.placement, transport.rank)
    return LogContext(rank=transport.rank, stages=",".join(str(stage) for stage in stages))


def _advise(config: Config) -> None:
    """Say once what would make the pipeline busier."""
    from mpipipe.planner import advice

    pipeline = config.pipeline
    assert pipeline.ranks is not None
    for line in advice(pipeline.ranks, pipeline.chunks, config.num_microbatches, pipeline.schedule):
        print(f"advice: {line}", file=sys.stderr, flush=True)
