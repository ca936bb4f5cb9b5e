"""The run folder of ``mpipipe train``: who may write there, what was done there before, and its metrics."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from mpipipe.checkpoint import find_latest
from mpipipe.collectives import all_gather_objects
from mpipipe.config import Config
from mpipipe.errors import ConfigError, SetupError
from mpipipe.formats.checkpoint import find_problems
from mpipipe.formats.paths import RunPaths
from mpipipe.lifecycle import RunLock
from mpipipe.transport import Transport


def on_first_rank(transport: Transport, paths: RunPaths, action: Callable[[], object]) -> object:
    """What ``action`` gives on rank 0, JSON-able. Raises the same ``SetupError`` on every rank for an ``OSError``."""
    result, trouble = None, None
    if transport.rank == 0:
        try:
            result = action()
        except OSError as error:
            trouble = f"run.dir: {paths.root} can't be used: {error}"
    result, trouble = all_gather_objects(transport, [result, trouble])[0]
    if trouble:
        raise SetupError(trouble)
    return result


def refuse_used_folder(paths: RunPaths, transport: Transport) -> None:
    """Raise ``ConfigError`` on every rank for a folder with an earlier run."""
    if on_first_rank(transport, paths, lambda: bool(paths.checkpoint_steps()) or paths.metrics.exists()):
        raise ConfigError(
            f'{paths.root} holds an earlier run, and resume is "never": nothing is written over it',
            key="run.dir",
            allowed='another folder, or run.resume = "auto"',
        )


def check_resume_folder(folder: Path, paths: RunPaths, transport: Transport, *, to_train: bool) -> None:
    """Raise ``ConfigError`` on every rank unless ``folder`` looks like a checkpoint: before anything is built.

    ``to_train``: also where the run folder holds later checkpoints, which those to come would collide with.
    """
    problem = on_first_rank(transport, paths, lambda: _resume_problem(folder, paths if to_train else None))
    if problem:
        raise ConfigError(str(problem), key="run.resume", value=str(folder))


def _resume_problem(folder: Path, paths: RunPaths | None) -> str | None:
    steps = RunPaths(folder).checkpoint_steps()
    if steps:
        names = ", ".join(str(RunPaths(folder).checkpoint(step)) for step in steps[-3:])
        return f"{folder} is a run folder: name one of its checkpoints ({names}), or go on in it with run.dir"
    if not folder.is_dir():
        return f"{folder} does not exist (current folder: {Path.cwd()})"
    if not (folder / "manifest.json").exists():
        return f"{folder} is no checkpoint: it has no manifest.json"
    if paths is None or folder.resolve().parent != paths.checkpoints.resolve():
        return None
    later = [step for step in paths.checkpoint_steps() if step > int(folder.name.removeprefix("step-"))]
    if not later:
        return None
    return (
        f"{paths.checkpoints} holds later checkpoints, up to step {later[-1]}, which those of this launch would collide"
        " with: move them away, or give this launch another run.dir"
    )


def finished_before(config: Config, paths: RunPaths, transport: Transport) -> tuple[int, Path] | None:
    """(step, checkpoint) when the run's newest checkpoint is at ``run.steps`` or beyond: nothing is left to do."""

    def look() -> list[object] | None:
        latest, _ = find_latest(paths.checkpoints) if paths.checkpoints.is_dir() else (None, [])
        step = -1 if latest is None else int(latest.name.removeprefix("step-"))
        if latest is None or step < config.run.steps or next(find_problems(latest), None) is not None:
            return None
        return [step, str(latest)]

    found = on_first_rank(transport, paths, look)
    return (int(found[0]), Path(found[1])) if isinstance(found, list) else None


def claim(lock: RunLock, paths: RunPaths, transport: Transport) -> None:
    """Take the run folder for this launch. Raises ``ConfigError`` on every rank while another launch writes there."""
    holder = on_first_rank(transport, paths, lock.acquire)
    if holder:
        raise ConfigError(
            f"another launch is writing to {paths.root} ({holder}); wait for it or end it",
            key="run.dir",
            value=str(paths.root),
            allowed="a folder that no other launch uses",
        )


def keep_config(config: Config, paths: RunPaths) -> None:
    """Write the resolved run file into the run folder, as a whole."""
    paths.checkpoints.mkdir(parents=True, exist_ok=True)
    part = paths.config.with_name(paths.config.name + ".part")
    part.write_text(config.to_toml(), encoding="utf-8")
    os.replace(part, paths.config)


class Metrics:
    """``metrics.jsonl``: one line a step, written by rank 0."""

    def __init__(self, path: Path, writes: bool) -> None:
        self._path = path
        self._writes = writes

    def rewind(self, step: int) -> None:
        """Drop the lines of steps after ``step``: they are done again. A line cut short by a kill goes too."""
        if not self._writes or not self._path.exists():
            return
        kept = []
        for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue
        part = self._path.with_name(self._path.name + ".part")
        part.write_text("".join(kept), encoding="utf-8")
        os.replace(part, self._path)

    def write(self, line: dict[str, object]) -> None:
        """Raises ``SetupError`` where the file can't be written: a run without room on its disk can't go on."""
        if not self._writes:
            return
        try:
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line, allow_nan=False) + "\n")
        except OSError as error:
            trouble = SetupError(f"{self._path} can't be written: {error}. Make room, and start again to go on")
            trouble.seen_alike = False
            raise trouble from error
