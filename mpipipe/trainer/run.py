"""The run that ``mpipipe train`` and ``mpipipe eval`` do: a GPT-2 family model on token files, from a run file."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from mpipipe.collectives import agree, barrier
from mpipipe.config import Config
from mpipipe.data import TokenSource
from mpipipe.errors import ConfigError, DataError, MpipipeError
from mpipipe.formats.paths import RunPaths
from mpipipe.lifecycle import RunLock, State, TimeLimit, write_status
from mpipipe.model import gpt2_layers, token_loss
from mpipipe.stage import Nested
from mpipipe.trainer.folder import (
    Metrics,
    check_resume_folder,
    claim,
    finished_before,
    keep_config,
    on_first_rank,
    other_data,
    refuse_used_folder,
)
from mpipipe.trainer.report import StepReport
from mpipipe.trainer.trainer import Trainer
from mpipipe.transport import Transport
from mpipipe.units import finite_or_none

_log = logging.getLogger(__name__)

EXIT_STOPPED = 75
Report = Callable[[dict[str, object]], None]


@dataclass(frozen=True)
class TrainOutcome:
    """How a run ended. ``exit_code``: 0 done, 75 stopped before its time limit after saving. ``validation_loss``: the
    last one, if any. ``skipped_steps``: steps of this launch that changed nothing.
    """

    exit_code: int
    step: int
    loss: float | None
    validation_loss: float | None
    checkpoint: Path | None
    skipped_steps: int = 0


def _batch(source: TokenSource, trainer: Trainer, first_sample: int, count: int) -> tuple[Nested, Nested]:
    """The batch, read only where it is looked at. The other ranks get tensors of the same shape that take no memory."""
    if {0, trainer.model.partition.num_stages - 1} & set(trainer.model.stages):
        try:
            batch = source.batch(first_sample, count)
        except DataError as error:
            error.seen_alike = False  # the ranks between do not read it
            raise
        return torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)
    empty = torch.zeros(1, 1, dtype=torch.int64).expand(count, source.sequence)
    return empty, empty


def _source(config: Config, key: str, transport: Transport) -> TokenSource:
    """The tokens of ``data.KEY``. Collective: the same ``DataError`` on every rank when one node lacks a file."""
    model = config.needed_model()

    def open_files() -> TokenSource:
        return TokenSource(
            getattr(config.data, key),
            sequence=model.sequence,
            vocab=model.vocab,
            seed=config.run.seed,
            shuffle=config.data.shuffle or key == "validation",
            key=f"data.{key}",
        )

    return agree(transport, open_files)


def _trainer(config: Config, transport: Transport) -> Trainer:
    layers = gpt2_layers(config.needed_model(), config.run.seed)
    trainer = Trainer(
        config,
        layers.factories,
        token_loss,
        tied=layers.tied,
        names=layers.names,
        descriptions=layers.descriptions,
        transport=transport,
    )
    trainer.repeat_bits()
    return trainer


def _validation_batches(config: Config, source: TokenSource, trainer: Trainer) -> Iterator[tuple[Nested, Nested]]:
    """``eval.batches`` batches of validation windows drawn by ``run.seed``, the same each time, or all windows.

    The last batch may be smaller.
    """
    size = config.batch.sequences
    last = source.num_windows if not config.eval.batches else min(source.num_windows, config.eval.batches * size)
    for first in range(0, last, size):
        yield _batch(source, trainer, first, min(size, last - first))


def train_run(
    config: Config, transport: Transport, *, resume: str | None = None, report: Report | None = None
) -> TrainOutcome:
    """Train as the run file says, to ``run.steps`` or to ``run.time_limit``. Collective.

    ``resume``: ``"auto"``, ``"never"`` or a checkpoint's folder; default ``run.resume``. ``report`` gets one dict a
    step and one for each evaluation, on every rank. ``status.json`` says in the end how the run ended.
    """
    paths = RunPaths(Path(config.run.dir))
    lock = RunLock(paths.lock)
    resume = resume or config.run.resume
    if resume == "never":
        refuse_used_folder(paths, transport)
    elif resume != "auto":
        check_resume_folder(Path(resume), paths, transport, to_train=True)
    report = report or (lambda line: None)
    if resume == "auto" and (before := finished_before(config, paths, transport)) is not None:
        told = {"event": "finished", "step": before[0], "steps": config.run.steps, "dir": config.run.dir}
        report(told | other_data(config, before[1]))
        return TrainOutcome(0, before[0], None, None, before[1])
    if on_first_rank(transport, paths, paths.root.is_dir):
        claim(lock, paths, transport)
    try:
        return _train(config, paths, lock, transport, resume, report)
    except BaseException as error:
        _note_failure(error, paths, transport.rank)
        raise
    finally:
        lock.release()


def _note_failure(error: BaseException, paths: RunPaths, rank: int) -> None:
    """``status.json`` of a run that ends by an error: of this launch, also where an earlier one had come to its end.

    An interrupt gains a note with the step that a new start goes on from.
    """
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, KeyboardInterrupt):
        what = "interrupted (SIGINT)"
        steps = paths.checkpoint_steps()
        error.add_note(f"the same command goes on from step {steps[-1]}" if steps else "no step was saved yet")
    alike = isinstance(error, MpipipeError) and error.seen_alike
    code = error.exit_code if isinstance(error, MpipipeError) and alike else 1
    if not paths.root.is_dir() or (alike and rank != 0):
        return
    try:
        write_status(paths.status, "failed", exit_code=code, rank=rank, error=what)
    except OSError as trouble:
        _log.warning("%s can't be written: %s", paths.status, trouble)


def _train(
    config: Config, paths: RunPaths, lock: RunLock, transport: Transport, resume: str, report: Report
) -> TrainOutcome:
    limit = TimeLimit(config.run.time_limit_s)
    config.require("data.train")
    source = _source(config, "train", transport)
    validation = _source(config, "validation", transport) if config.data.validation else None
    trainer = _trainer(config, transport)
    trainer.saver.facts["data.train"] = source.fingerprint
    trainer.saver.facts["data.shuffle"] = str(config.data.shuffle).lower()
    try:
        if resume != "never":
            trainer.restore(None if resume == "auto" else resume)
        claim(lock, paths, transport)
        trainer.folder.taken()
        on_first_rank(transport, paths, lambda: keep_config(config, paths))
        run = _Run(trainer, source, validation, Metrics(paths.metrics, transport.rank == 0), limit, report)
        outcome = run.to_the_end()
    except BaseException:
        trainer.recorder.close(complete=False)
        raise
    trainer.close()
    barrier(transport)  # no rank is left that could still write "failed", and be overwritten here
    if transport.rank == 0:
        state: State = "done" if outcome.exit_code == 0 else "stopped"
        write_status(paths.status, state, exit_code=outcome.exit_code, step=outcome.step, loss=outcome.loss)
    return outcome


class _Run:
    """The loop over steps."""

    def __init__(
        self,
        trainer: Trainer,
        source: TokenSource,
        validation: TokenSource | None,
        metrics: Metrics,
        limit: TimeLimit,
        report: Report,
    ) -> None:
        self.trainer = trainer
        self.config = trainer.config
        self.source = source
        self.validation = validation
        self.metrics = metrics
        self.limit = limit
        self.report = report
        self.saved: Path | None = None
        self.skipped_steps = 0
        self.validation_loss: float | None = None

    def to_the_end(self) -> TrainOutcome:
        trainer, config = self.trainer, self.config
        self.metrics.rewind(trainer.step_index)
        self._status()
        self.report(
            {
                "event": "start",
                "step": trainer.step_index,
                "steps": config.run.steps,
                "partition": str(trainer.model.partition),
                "device": trainer.device.name,
                "message_path": trainer.message_path,
            }
        )
        if self.validation is not None and trainer.step_index == 0:
            self._evaluate()
        stop = False
        while trainer.step_index < config.run.steps and not stop:
            step = self._step()
            stop = step.stop and trainer.step_index < config.run.steps
            last = trainer.step_index == config.run.steps
            every = config.eval.every_steps
            line = step.as_metrics()
            if self.validation is not None and (last or (every and trainer.step_index % every == 0)) and not stop:
                line["validation_loss"] = finite_or_none(self._evaluate())
            self.metrics.write(line)
            self.saved = self._save(force=stop or last)
        loss = trainer.last_report.loss if trainer.last_report else None
        code = EXIT_STOPPED if stop else 0
        return TrainOutcome(code, trainer.step_index, loss, self.validation_loss, self.saved, self.skipped_steps)

    def _step(self) -> StepReport:
        trainer = self.trainer
        t0 = time.perf_counter_ns()
        batch = _batch(self.source, trainer, trainer.samples_seen, self.config.batch.sequences)
        loaded = (t0, time.perf_counter_ns())
        step = trainer.step_report(batch, stop=self.limit.reached, loaded_ns=loaded)
        self.limit.note_step(step.step_s)
        self.skipped_steps += step.skipped is not None
        self.report({"event": "step", "steps": self.config.run.steps, **step.as_metrics()})
        return step

    def _save(self, *, force: bool) -> Path | None:
        trainer = self.trainer
        if not (force or trainer.saver.due(trainer.step_index)):
            return self.saved
        folder = trainer.save()
        self.limit.note_save(trainer.saver.last_save_s)
        self._status()
        self.report({"event": "checkpoint", "step": trainer.step_index, "path": str(folder)})
        return folder

    def _evaluate(self) -> float:
        assert self.validation is not None
        start = time.monotonic()
        self.validation_loss = self.trainer.evaluate(_validation_batches(self.config, self.validation, self.trainer))
        self.limit.note_evaluation(time.monotonic() - start)
        self.report({"event": "evaluation", "step": self.trainer.step_index, "validation_loss": self.validation_loss})
        return self.validation_loss

    def _status(self) -> None:
        """Collective: no rank may be past this, fail and say so, while rank 0 still writes that all is well."""
        trainer, steps = self.trainer, self.config.run.steps
        on_first_rank(
            trainer.transport,
            trainer.paths,
            lambda: write_status(trainer.paths.status, "running", exit_code=None, step=trainer.step_index, steps=steps),
        )


def eval_run(config: Config, transport: Transport, *, resume: str | None = None) -> dict[str, object]:
    """Loss over the validation tokens with the newest checkpoint's weights (or those at ``resume``), changing nothing
    on disk. Collective.
    """
    config.require("data.validation")
    wanted = resume or config.run.resume
    if wanted not in ("auto", "never"):
        check_resume_folder(Path(wanted), RunPaths(Path(config.run.dir)), transport, to_train=False)
    source = _source(config, "validation", transport)
    silent = config.model_copy(update={"trace": config.trace.model_copy(update={"enabled": False})})
    trainer = _trainer(silent, transport)
    step = trainer.restore(None if wanted == "auto" else wanted) if wanted != "never" else 0
    if wanted == "auto" and not trainer.saver.restored:
        raise ConfigError(
            f"{config.run.dir} holds no checkpoint",
            key="run.dir",
            value=config.run.dir,
            allowed="the folder of a run, or --resume never for the loss of the initial weights",
        )
    loss = trainer.evaluate(_validation_batches(config, source, trainer))
    sequences = (
        source.num_windows
        if not config.eval.batches
        else min(source.num_windows, config.eval.batches * config.batch.sequences)
    )
    return {"step": step, "validation_loss": loss, "sequences": sequences, "tokens": sequences * source.sequence}
