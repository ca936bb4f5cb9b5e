"""How far a run is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TextIO

from mpipipe.units import format_bytes, format_seconds


class StepLine(Protocol):
    """Takes a run's reports: one a step (``step``, ``steps``, ``loss``, ``lr``, ``tokens_per_s``, ``bubble_fraction``),
    and others.

    ``event`` says which it is: ``"start"``, ``"step"`` (also without ``event``), ``"evaluation"``, ``"checkpoint"``.
    """

    def __call__(self, figures: Mapping[str, object]) -> None: ...


def _number(value: object, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else "-"


def step_text(figures: Mapping[str, object]) -> str:
    """One line for a step: ``step 20/200  loss 3.2145  lr 0.001  5120 tokens/s  bubble fraction 0.123``."""
    bubble = figures.get("bubble_fraction")
    return (
        f"step {figures.get('step')}/{figures.get('steps')}  loss {_number(figures.get('loss'), '.4f')}  "
        f"lr {_number(figures.get('lr'), '.3g')}  {_number(figures.get('tokens_per_s'), '.0f')} tokens/s  "
        f"bubble fraction {_number(bubble, '.3f')}"
    )


def event_text(figures: Mapping[str, object]) -> str:
    """One line for a report that is not of a step."""
    event, step = figures.get("event"), figures.get("step")
    if event == "start":
        path = "" if figures.get("message_path", "host") == "host" else f", messages {figures['message_path']}"
        where = f" on {figures['device']}{path}" if "device" in figures else ""
        begin = f"starts at step {step} of {figures.get('steps')}{where}"
        return "\n  ".join([begin, *str(figures.get("partition", "")).splitlines()])
    if event == "finished":
        return _finished_text(figures)
    if event == "evaluation":
        return f"step {step}: validation loss {_number(figures.get('validation_loss'), '.4f')}"
    if event == "checkpoint":
        return f"step {step}: saved {figures.get('path')}"
    return ", ".join(f"{key} {value}" for key, value in figures.items())


def _finished_text(figures: Mapping[str, object]) -> str:
    step, steps, folder = figures.get("step"), figures.get("steps"), figures.get("dir")
    lines = [
        f"nothing left to do: step {step} of run.steps = {steps} is done in {folder}. Raise run.steps to go on; to "
        "begin anew, set run.dir to another folder"
    ]
    if "trained_on" in figures:
        before, now = _names(figures["trained_on"]), _names(figures["asked_for"])
        lines.append(f"warning: that run was trained on {before}, not {now}")
    return "\n".join(lines)


def _names(files: object) -> str:
    return ", ".join(map(str, files)) if isinstance(files, list) else str(files)


def is_step(figures: Mapping[str, object]) -> bool:
    """Whether a report is that of a step."""
    return figures.get("event", "step") == "step"


@contextmanager
def step_progress(every_steps: int, stream: TextIO | None = None, bar: bool = True) -> Iterator[StepLine]:
    """A StepLine that shows steps on ``stream`` (default: standard error).

    A terminal gets a bar with the newest figures. Anything else gets a line for the first step it sees, then for every
    multiple of ``every_steps`` and for the last, and so does a terminal without ``bar``. Other reports get a line each.
    """
    out = sys.stderr if stream is None else stream
    if not bar or not out.isatty():
        yield _plain_lines(every_steps, out)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), TextColumn("{task.description}", markup=False), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=out)) as drawn:
        task = drawn.add_task("first step", total=None)

        def show(figures: Mapping[str, object]) -> None:
            if not is_step(figures):
                drawn.console.print(event_text(figures), markup=False, highlight=False)
                return
            steps, step = figures.get("steps"), figures.get("step")
            drawn.update(
                task,
                description=step_text(figures),
                total=float(steps) if isinstance(steps, int) else None,
                completed=float(step) if isinstance(step, int) else 0.0,
            )

        yield show


def _plain_lines(every_steps: int, out: TextIO) -> StepLine:
    shown: list[object] = []
    lines = _Lines(out)

    def show(figures: Mapping[str, object]) -> None:
        if not is_step(figures):
            lines.write(event_text(figures))
            return
        step = figures.get("step")
        due = isinstance(step, int) and step % every_steps == 0
        if due or not shown or step == figures.get("steps"):
            shown[:] = [step]
            lines.write(step_text(figures))

    return show


class _Lines:
    """Writes lines until nobody reads them any more: a closed pipe (``| head``) does not end a training."""

    def __init__(self, out: TextIO) -> None:
        self._out: TextIO | None = out

    def write(self, line: str) -> None:
        if self._out is None:
            return
        try:
            print(line, file=self._out, flush=True)
        except BrokenPipeError:
            self._out = None


@contextmanager
def counted_progress(what: str, stream: TextIO | None = None) -> Iterator[_Counter]:
    """A callback ``(done, total)`` in bytes (total 0: not known) for work that may take over two seconds: a bar on a
    terminal, a line every ten seconds elsewhere.
    """
    out = sys.stderr if stream is None else stream
    counter = _Counter(what, out)
    yield counter
    counter.finish()


class _Counter:
    """Counts bytes; says nothing in the first two seconds."""

    def __init__(self, what: str, out: TextIO) -> None:
        self._what, self._out = what, out
        self._begun = self._told = time.monotonic()
        self._interval_s = 0.2 if out.isatty() else 10.0
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._begun < 2.0 or now - self._told < self._interval_s:
            return
        self._told, self._shown = now, True
        ending = "\r" if self._out.isatty() else "\n"
        if total:
            share = done / total
            left = (now - self._begun) * (1 / share - 1) if share else float("inf")
            far = f"{100 * share:.0f} %, {format_seconds(left)} left"
        else:
            far = f"{format_bytes(done)} so far"
        print(f"{self._what}: {far}   ", end=ending, file=self._out, flush=True)

    def finish(self) -> None:
        """End the line of a terminal."""
        if self._shown and self._out.isatty():
            print(file=self._out, flush=True)
