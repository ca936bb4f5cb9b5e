"""The run folder of ``mpipipe train``: who may write there, what was done there before, and its metrics."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from mpipipe import collectives
from mpipipe.config import Config
from mpipipe.errors import ConfigError, MpipipeError, SetupError
from mpipipe.formats.checkpoint import MANIFEST_NAME, find_latest, find_problems, read_manifest
from mpipipe.formats.paths import RunPaths, step_of
from mpipipe.formats.whole import replace_text
from mpipipe.lifecycle import RunLock, this_process
from mpipipe.transport import Transport

FILES_TIMEOUT_S = 3600.0
"""While one rank writes, reads or removes files the others wait for it: longer than for a message (comm.timeout_s)."""


@contextlib.contextmanager
def long_waits(transport: Transport, config: Config) -> Iterator[None]:
    """For work on files that others wait for: no wait ends before ``FILES_TIMEOUT_S``."""
    comm = config.comm
    transport.configure(timeout_s=max(comm.timeout_s, FILES_TIMEOUT_S), wait=comm.wait)
    try:
        yield
    finally:
        transport.configure(timeout_s=comm.timeout_s, wait=comm.wait)


def on_first_rank(transport: Transport, paths: RunPaths, action: Callable[[], object]) -> object:
    """What ``action`` gives on rank 0, JSON-able. Its error is raised on every rank; an ``OSError`` as a
    ``SetupError``.
    """

    def guarded() -> object:
        try:
            return action()
        except MpipipeError:
            raise
        except OSError as error:
            raise SetupError(f"run.dir: {paths.root} can't be used: {error}") from error

    return collectives.on_first_rank(transport, guarded)


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

    ``to_train``: also where the run folder holds what this launch would write over: later checkpoints, or the records
    of a run that the checkpoint is not of.
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
    if not (folder / MANIFEST_NAME).exists():
        return f"{folder} is no checkpoint: it has no {MANIFEST_NAME}"
    if paths is None:
        return None
    step = read_manifest(folder).step
    if folder.resolve().parent != paths.checkpoints.resolve():
        if not paths.checkpoint_steps() and not paths.metrics.exists():
            return None
        return (
            f"{paths.root} holds a run already, and {folder} is no checkpoint of it: give this launch another run.dir, "
            'or go on with the run that is there by run.resume = "auto"'
        )
    later = [known for known in paths.checkpoint_steps() if known > step]
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
        step = None if latest is None else step_of(latest)
        if latest is None or step is None or step < config.run.steps or next(find_problems(latest), None) is not None:
            return None
        return [step, str(latest)]

    with long_waits(transport, config):
        found = on_first_rank(transport, paths, look)
    return (int(found[0]), Path(found[1])) if isinstance(found, list) else None


def other_data(config: Config, checkpoint: Path) -> dict[str, object]:
    """The token files of a checkpoint's run (``trained_on``) and of the config (``asked_for``); empty where their names
    are the same.
    """
    try:
        before = Config.from_toml(read_manifest(checkpoint).config_text, str(checkpoint)).data.train
    except MpipipeError:
        return {}
    return {} if before == config.data.train else {"trained_on": list(before), "asked_for": list(config.data.train)}


def claim(lock: RunLock, paths: RunPaths, transport: Transport, *, also: str = "") -> None:
    """Take the run folder for this launch. Raises ``ConfigError`` on every rank while another launch writes there; not
    where rank 0 finds that ``also`` holds it.
    """
    holder = on_first_rank(transport, paths, lambda: _other_holder(lock, also))
    if holder:
        raise ConfigError(
            f"another launch is writing to {paths.root} ({holder}); wait for it or end it",
            key="run.dir",
            value=str(paths.root),
            allowed="a folder that no other launch uses",
        )


class RunFolder:
    """Keeps other launches out of the run folder, from the first thing that a trainer writes there to its end."""

    def __init__(self, paths: RunPaths, transport: Transport) -> None:
        self._paths = paths
        self._transport = transport
        self._lock = RunLock(paths.lock)
        self._is_ours = False

    def take(self) -> None:
        """Collective, the first time. Raises ``ConfigError`` on every rank while another launch writes there; another
        trainer of this process is none.
        """
        if not self._is_ours:
            claim(self._lock, self._paths, self._transport, also=this_process())
            self._is_ours = True

    def taken(self) -> None:
        """The caller has claimed it, on all ranks."""
        self._is_ours = True

    def release(self) -> None:
        """Let other launches in; nothing if this trainer did not keep them out."""
        self._lock.release()


def _other_holder(lock: RunLock, also: str) -> str | None:
    holder = lock.acquire()
    return None if also and holder == also else holder


def keep_config(config: Config, paths: RunPaths) -> None:
    """Write the resolved run file into the run folder, as a whole."""
    paths.checkpoints.mkdir(parents=True, exist_ok=True)
    replace_text(paths.config, config.to_toml())


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
        replace_text(self._path, "".join(kept))

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
