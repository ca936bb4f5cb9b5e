"""The trainer: wires the rooms together, and does one step at a time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from mpipipe import collectives
from mpipipe.config import Config
from mpipipe.engine import Engine, RankProgram, RunResult, compile_program
from mpipipe.environment import threads_per_rank
from mpipipe.formats.paths import RunPaths
from mpipipe.formats.trace import EventKind
from mpipipe.lifecycle import PlaceSignal
from mpipipe.optim import AdamW, clip_factor, learning_rate, square_sums
from mpipipe.partition import LayerDescription
from mpipipe.planner import schedule_table
from mpipipe.schedule import ScheduleTable, forward_only, verify
from mpipipe.stage import LossFunction, Nested, clear_all
from mpipipe.trace import Recorder
from mpipipe.trainer.build import Layer, LayerList, build_rank_model
from mpipipe.trainer.devices import open_rank_device
from mpipipe.trainer.ending import end_job, open_or_end
from mpipipe.trainer.feed import TensorFeed
from mpipipe.trainer.folder import RunFolder
from mpipipe.trainer.norm import gradient_norm
from mpipipe.trainer.report import Shared, StepReport, other_size_text, reason_to_skip, refuse_difference
from mpipipe.trainer.sameness import (
    instance_checksums,
    joined,
    refuse_other_batches,
    refuse_other_tables,
    refuse_other_weights,
    warn_of_forward_order,
)
from mpipipe.trainer.saving import Saver
from mpipipe.trainer.shared import note
from mpipipe.trainer.tracing import open_trace
from mpipipe.transport import Transport

_log = logging.getLogger(__name__)


class Trainer:
    """Trains layers over all ranks of a job. Every method is collective: each rank calls it with the same arguments.

    ``layers``: torch modules, or factories without arguments, one after another; a factory runs only on the rank that
    owns the layer. ``loss_fn(output, target) -> (sum, count)``. ``tied``: pairs of parameter names, ``"0.weight"``
    being parameter ``weight`` of layer 0 (or ``NAME.weight`` with ``names``). ``descriptions``: what layers cost, for
    ``pipeline.partition = "cost"``. ``transport``: default is every rank of the MPI launch.

    Torch computes with ``OMP_NUM_THREADS`` threads from here on, or with this rank's share of the node's cores.

    An error while it is made, or that leaves its ``with`` block, ends the whole job on an MPI launch of several ranks,
    after one report: the others may be waiting for this rank.
    """

    def __init__(
        self,
        config: Config,
        layers: Sequence[Layer],
        loss_fn: LossFunction,
        *,
        tied: Sequence[tuple[str, str]] = (),
        names: Sequence[str] | None = None,
        descriptions: Sequence[LayerDescription] | None = None,
        transport: Transport | None = None,
    ) -> None:
        self._closed = False
        self._owns_transport = transport is None
        self.transport: Transport = open_or_end() if transport is None else transport
        try:
            self._build(config, layers, loss_fn, tied, names, descriptions)
        except BaseException as error:
            self._end_the_job(error)
            raise

    def _build(
        self,
        config: Config,
        layers: Sequence[Layer],
        loss_fn: LossFunction,
        tied: Sequence[tuple[str, str]],
        names: Sequence[str] | None,
        descriptions: Sequence[LayerDescription] | None,
    ) -> None:
        self.config = config.resolve(self.transport.size)
        torch.set_num_threads(threads_per_rank(self.transport.local_size))
        self.transport.configure(timeout_s=self.config.comm.timeout_s, wait=self.config.comm.wait)
        self.device, self.message_path = open_rank_device(self.config, self.transport)
        self._tables: dict[int, tuple[int, RankProgram]] = {}
        self._evaluation_programs: dict[int, RankProgram] = {}
        self._layers = model = LayerList.of(layers, names, descriptions, tied)
        self._table = schedule_table(self.config, self.transport.size, self.config.num_microbatches, model.descriptions)
        refuse_other_tables(self.transport, self._table)
        placement = self._table.placement
        self._looks_at_batches = self.transport.size > 1 and self.transport.rank in (placement[0], placement[-1])
        self._instances = instance_checksums(layers) if self.transport.size > 1 else None
        self.model = build_rank_model(self.config, model, loss_fn, placement, self.transport, self.device)
        self._shared_buffers = self.model.shared_buffers
        warn_of_forward_order(self._table, self.model.stages)
        self.optimizer = AdamW(self.model.parameters, self.config)
        self.paths = RunPaths(Path(self.config.run.dir))
        self.folder = RunFolder(self.paths, self.transport)
        self.recorder = Recorder(None)
        self._traced = self._told_of_size = False
        self._silent = Recorder(None)
        self._recorder_now = self._silent
        self._engine = Engine(
            self.transport,
            self.device,
            self.recorder,
            self.model.stages,
            len(placement),
            receive_ahead_bytes=self.config.comm.receive_ahead_bytes,
        )
        self.saver = Saver(self.config, self.paths, self.transport, self.model, self.optimizer, self.recorder)
        self.step_index = 0
        self.samples_seen = 0
        self.last_report: StepReport | None = None
        self._synchronize_clocks()
        self._signal = PlaceSignal(self.transport)

    def repeat_bits(self) -> None:
        """On a GPU: let torch, in this whole process, take kernels that repeat their bits. ``mpipipe train`` does."""
        self.device.repeat_bits()

    # --- one step ---

    def step(self, batch: tuple[Nested, Nested]) -> float:
        """One optimizer step; the loss per valid item of the whole batch, the same float on every rank (nan if no item
        is valid).

        ``batch``: (inputs, targets), any structure of tensors with the batch first; it is cut into microbatches of
        ``batch.microbatch``. The loader decides how many rows it has: another number than ``batch.sequences`` is taken
        as it is, with a warning the first time.
        """
        report = self.step_report(batch)
        return math.nan if report.loss is None else report.loss

    def step_report(
        self, batch: tuple[Nested, Nested], *, stop: bool = False, loaded_ns: tuple[int, int] | None = None
    ) -> StepReport:
        """One step with all its figures. ``stop`` on any rank comes back as ``stop`` on every rank. ``loaded_ns``: from
        when to when this rank loaded the batch (``time.perf_counter_ns``), for the trace.
        """
        config = self.config
        self._compare_instances()
        self.model.check_trained()
        feed = TensorFeed(
            batch,
            config.batch.microbatch,
            self.device,
            looked_at=self._looks_at_batches,
            draw_seed=config.run.seed,
            step=self.step_index,
            first_sample=self.samples_seen,
        )
        if feed.rows != config.batch.sequences and not self._told_of_size:
            self._told_of_size = True
            if self.transport.rank == 0:
                _log.warning("%s", other_size_text(feed.rows, feed.num_microbatches, config))
        table_id, program = self._program(feed.num_microbatches)
        recorder = self._step_recorder()
        start = time.perf_counter_ns()  # a table to build and trace files to open are no part of the step
        recorder.begin_step(self.step_index + 1, table_id)
        if loaded_ns is not None:
            recorder.record(int(EventKind.LOAD_DATA), *loaded_ns)
        clear_all(self.model.all_gradients)
        result = self._run(program, feed, f"step {self.step_index + 1}")
        shared = self._share(result, feed, recorder, stop)
        norm, skipped = self._update(recorder, shared)
        loss = shared.loss_sum / shared.count if shared.count else None
        self.step_index += 1
        self.samples_seen += feed.rows
        end = time.perf_counter_ns()
        recorder.end_step(start, end, shared.count, loss)
        rate = learning_rate(config, self.step_index - 1)
        self.last_report = report = StepReport(
            self.step_index,
            loss,
            norm,
            rate,
            shared.count,
            (end - start) / 1e9,
            shared.bubble_fraction,
            skipped,
            shared.stop,
        )
        return report

    def _run(self, program: RankProgram, feed: TensorFeed, what: str) -> RunResult:
        try:
            self._shared_buffers.begin()
            result = self._engine.run(program, feed, what)
            self._shared_buffers.refuse_changed()
            return result
        except (Exception, SystemExit) as error:
            note(error, f"in {what}")
            raise

    def _share(self, result: RunResult, feed: TensorFeed, recorder: Recorder, stop: bool) -> Shared:
        """Tell every rank the loss, the number of valid items and what the pipeline took. Raises ``EngineError`` on
        every rank when they are not at the same step, ``DataError`` when they were not given the same batch.
        """
        t0 = time.perf_counter_ns()
        offset = self._clock_offset_ns
        times = [recorder.busy_ns, result.start_ns + offset, result.end_ns + offset]
        mine = [result.loss_sum, result.count, *times, float(stop), feed.rows, self.step_index, feed.checksum]
        rows = collectives.all_gather(self.transport, np.array(mine, dtype=np.float64))
        recorder.record(int(EventKind.LOSS), t0, time.perf_counter_ns())
        for column, what in ((6, "sequences in the batch"), (7, "steps done")):
            refuse_difference(rows[:, column].tolist(), what)
        refuse_other_batches(rows[:, 8].tolist())
        last = rows[self.model.placement[-1]]
        makespan = rows[:, 4].max() - rows[:, 3].min()
        bubble = 1.0 - rows[:, 2].sum() / (self.transport.size * makespan) if makespan > 0 else 0.0
        return Shared(float(last[0]), int(last[1]), float(bubble), bool(rows[:, 5].any()))

    def _update(self, recorder: Recorder, shared: Shared) -> tuple[float, str | None]:
        """Add up tied parts, divide once by the count, clip by the norm of the whole gradient, and step. Returns (norm,
        why it was skipped).
        """
        t0 = time.perf_counter_ns()
        for group in self.model.tied:
            group.add_up(self.transport, self.device)
        t1 = time.perf_counter_ns()
        if self.model.tied:
            recorder.record(int(EventKind.TIED_REDUCE), t0, t1)
        gradients = {name: gradient.finish() for name, gradient in self.model.gradients.items()}
        factor = 1.0 / shared.count if shared.count else None
        squares = square_sums(gradients, factor, blocks_at_once=self.device.blocks_at_once)
        norm, first_bad = gradient_norm(self.model, self.transport, squares)
        t2 = time.perf_counter_ns()
        recorder.record(int(EventKind.CLIP), t1, t2)
        skipped = reason_to_skip(shared, first_bad)
        if skipped is None:
            factor = clip_factor(norm, self.config.optimizer.clip_norm)
            if factor is not None and gradients:
                torch._foreach_mul_(list(gradients.values()), factor)
            self.optimizer.step(gradients, learning_rate(self.config, self.step_index))
        elif self.transport.rank == 0:
            _log.warning("step %d changes nothing: %s", self.step_index + 1, skipped)
        recorder.record(int(EventKind.OPTIMIZER), t2, time.perf_counter_ns())
        return norm, skipped

    def _compare_instances(self) -> None:
        """Once, before weights are first used that came with the layers."""
        if self._instances is not None and not self.saver.restored:
            refuse_other_weights(self.transport, self._layers.names, self._instances)
        self._instances = None

    # --- evaluation ---

    def evaluate(self, batches: Iterable[tuple[Nested, Nested]]) -> float:
        """Loss per valid item over all ``batches`` (nan without any). Changes nothing: weights, moments, random state,
        position.

        Batches may have other sizes than those of a step. Raises ``EngineError`` or ``DataError`` on every rank when
        one was given other batches.
        """
        self._compare_instances()
        t0 = time.perf_counter_ns()
        total, count, done, sequences, seen = 0.0, 0, 0, 0, 0
        self._engine.recorder = self._silent
        modes = [(module, module.training) for layer in self.model.modules for module in layer.modules()]
        for layer in self.model.modules:
            layer.eval()
        try:
            for batch in batches:
                feed = TensorFeed(
                    batch, self.config.batch.microbatch, self.device, looked_at=self._looks_at_batches
                )
                program = self._evaluation_program(feed.num_microbatches)
                result = self._run(program, feed, f"batch {done + 1} of an evaluation")
                total += result.loss_sum
                count += result.count
                done += 1
                sequences += feed.rows
                seen = joined(seen, feed.checksum)
        finally:
            for module, training in modes:
                module.training = training
            self._engine.recorder = self._recorder_now
        rows = collectives.all_gather(self.transport, np.array([total, count, done, sequences, seen], dtype=np.float64))
        self._recorder_now.record(int(EventKind.EVALUATE), t0, time.perf_counter_ns())
        refuse_difference(rows[:, 2].tolist(), "batches in the evaluation")
        refuse_difference(rows[:, 3].tolist(), "sequences in the evaluation")
        refuse_other_batches(rows[:, 4].tolist(), "batch to the evaluation")
        total, count = rows[self.model.placement[-1], :2]
        return float(total / count) if count else math.nan

    # --- state ---

    def save(self) -> Path:
        """Save everything that a resume needs; the checkpoint's folder."""
        self.folder.take()
        self._synchronize_clocks()
        return self.saver.save(self.step_index, self.samples_seen)

    def save_if_due(self) -> Path | None:
        """Save when ``checkpoint.every_steps`` or ``checkpoint.every_minutes`` says so."""
        return self.save() if self.saver.due(self.step_index) else None

    def restore(self, path: str | Path | None = None) -> int:
        """Load the checkpoint at ``path``, or the newest complete one of the run folder; the step it was saved at, 0
        without any.
        """
        found = self.saver.restore(path)
        if found is not None:
            self.step_index, self.samples_seen = found
            self.optimizer.set_steps_done(self.saver.updates_done)
        return self.step_index

    # --- tables, clocks, the end ---

    def _program(self, m: int) -> tuple[int, RankProgram]:
        """The program for ``m`` microbatches and the number under which the trace knows its table."""
        if m not in self._tables:
            table = self._table  # made at the start, by a search under "auto"
            if m != table.m:
                table = schedule_table(self.config, self.transport.size, m, self._layers.descriptions)
            verify(table)
            self._tables[m] = (len(self._tables), compile_program(table, self.transport.rank, self.model.first_trained))
            self._record_table(len(self._tables) - 1, table)
        return self._tables[m]

    def _evaluation_program(self, m: int) -> RankProgram:
        if m not in self._evaluation_programs:
            table = forward_only(self.model.placement, self.transport.size, self.config.pipeline.chunks, m)
            self._evaluation_programs[m] = compile_program(table, self.transport.rank)
        return self._evaluation_programs[m]

    def _step_recorder(self) -> Recorder:
        """The trace's recorder if this step is to be traced, else one that keeps nothing. The first traced step opens
        the files: a launch that does no step leaves none.
        """
        trace, step = self.config.trace, self.step_index + 1
        wanted = trace.enabled and step >= trace.first_step and (trace.last_step is None or step <= trace.last_step)
        if wanted and not self._traced:
            self._traced = True
            self.folder.take()
            about = (self.config, self.paths, self.transport, self.model, self._layers)
            self.recorder.attach(open_trace(*about, self.device.name, self.message_path))
            self._synchronize_clocks()
            for table_id, program in self._tables.values():
                self._record_table(table_id, program.table)
        self._recorder_now = self.recorder if wanted else self._silent
        self._engine.recorder = self.saver.recorder = self._recorder_now
        return self._recorder_now

    def _record_table(self, table_id: int, table: ScheduleTable) -> None:
        self.recorder.add_schedule(table_id, table.rows(pairs=False), table.placement, table.name)

    def _synchronize_clocks(self) -> None:
        sample = collectives.compare_clocks(self.transport)
        self._clock_offset_ns = sample.offset_ns
        self.recorder.clock(sample.local_ns, sample.offset_ns, sample.rtt_ns)

    def close(self) -> None:
        """Collective. Write the trace's end; end MPI if this trainer began it. A second call does nothing."""
        if self._closed:
            return
        self._synchronize_clocks()
        self.recorder.close()
        if self._owns_transport:
            self.transport.close()
        self._signal.close()
        self.folder.release()
        self._closed = True

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.close()
            else:
                self._signal.close()
                self.recorder.close(complete=False)
        except BaseException as trouble:
            self._end_the_job(error or trouble)
            raise
        if error is not None:
            self._end_the_job(error)

    def _end_the_job(self, error: BaseException) -> None:
        if self._owns_transport and self.transport.size > 1 and not self._closed:
            end_job(self.transport, error)
