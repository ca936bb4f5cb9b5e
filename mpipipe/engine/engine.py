"""The engine: does the next operation of its rank's program, and knows nothing of schedules.

One kind of operation, one handler. What is computed comes from the stages, what moves goes through ``Mail``, and when
it happened goes to the recorder.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from mpipipe.device import Buffer, Device, Stamp
from mpipipe.engine.agreement import Agreement
from mpipipe.engine.feed import Feed
from mpipipe.engine.messages import Mail
from mpipipe.engine.program import Op, RankProgram
from mpipipe.engine.window import RECEIVE_AHEAD_BYTES
from mpipipe.errors import EngineError
from mpipipe.formats.trace import FLAG_DEVICE_TIME, FLAG_GRADIENT, EventKind
from mpipipe.schedule import Kind
from mpipipe.stage import Activation, Gradients, MicrobatchKey, Nested, Stage, whole_count
from mpipipe.trace import Recorder
from mpipipe.transport import Place, Transport

STORY_LENGTH = 12

_RECV_WAIT, _SEND_POST, _SEND_WAIT = int(EventKind.RECV_WAIT), int(EventKind.SEND_POST), int(EventKind.SEND_WAIT)
_COPY_TO_HOST, _COPY_TO_DEVICE = int(EventKind.COPY_TO_HOST), int(EventKind.COPY_TO_DEVICE)
_F, _B, _I, _W = int(EventKind.F), int(EventKind.B), int(EventKind.I), int(EventKind.W)


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a rank knows after a run. ``loss_sum`` and ``count`` are of the whole batch on the owner of the last stage,
    elsewhere 0.

    ``start_ns``, ``end_ns``: this rank's clock at the first and after the last operation. ``peak_live``: most
    microbatches (of all this rank's chunks) kept at once between their forward and their backward.
    """

    loss_sum: float
    count: int
    start_ns: int
    end_ns: int
    peak_live: int


class Engine:
    """Runs programs on one rank. Reused for any number of runs and tables."""

    def __init__(
        self,
        transport: Transport,
        device: Device,
        recorder: Recorder,
        stages: dict[int, Stage],
        num_stages: int,
        *,
        receive_ahead_bytes: int = RECEIVE_AHEAD_BYTES,
    ) -> None:
        self._stages = stages
        self._device = device
        self._stamp: Callable[[], Stamp] = device.stamp
        self._is_timed = device.timed
        self._timed: list[tuple[int, Stamp, Stamp, Op]] = []
        self._last = num_stages - 1
        self.recorder = recorder
        self._rank, self._alone = transport.rank, transport.size == 1
        self._unfinished = ""
        self.mail = Mail(transport, device, receive_ahead_bytes)
        for stage in stages.values():
            stage.between = self.mail.poll
        self._agreement = Agreement(transport)
        self._story: deque[Op] = deque(maxlen=STORY_LENGTH)
        self._run_name = ""
        self._phase = "before its first step"
        here = weakref.ref(self)  # the transport outlives the engine
        transport.describe_by(lambda look: Place() if (engine := here()) is None else engine.place(look))
        handlers: dict[Kind, Callable[[Op], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward_input,
            Kind.W: self._backward_weight,
            Kind.SEND_F: self._send_activation,
            Kind.SEND_B: self._send_gradient,
            Kind.RECV_F: self._receive_activation,
            Kind.RECV_B: self._receive_gradient,
        }
        self._handlers = tuple(handlers[kind] for kind in Kind)

    def run(self, program: RankProgram, feed: Feed, name: str = "a step") -> RunResult:
        """Do every operation of ``program`` once. ``name``: of the run, in reports of where the rank is.

        A program without backward evaluates: nothing is kept, gradients stay as they are. Errors keep their type and
        gain a note with rank, operation and the operations before it. After one, a rank that is not alone runs no more:
        raises ``EngineError``.
        """
        if self._unfinished and not self._alone:
            raise EngineError(
                f"{name} can't begin: {self._unfinished} did not end, and messages of it may still be on their way "
                "between the ranks. Let the error end the job, and go on from the newest checkpoint"
            )
        self._unfinished = name
        self._run_name, self._phase = name, "in"
        self._begin(program, feed)
        handlers, story, poll = self._handlers, self._story, self.mail.poll
        start = time.perf_counter_ns()
        op: Op | None = None
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(self._training):
                for op in program.ops:
                    story.append(op)
                    if op.polls:
                        poll()
                    handlers[op.kind](op)
                self._phase = "at the end of its row in"
                self._finish_sends()
                self._record_timed()
        except (Exception, SystemExit) as error:
            before = " ".join(map(str, list(story)[:-1])) or "nothing"
            with suppress(Exception):  # an error that takes no note
                error.add_note(f"mpipipe: rank {self._rank} at {op}; before it: {before}")
            raise
        end = time.perf_counter_ns()
        self._check_empty()
        self._phase, self._unfinished = "after", ""
        del self._feed, self._draw  # the batch
        return RunResult(self._loss_sum(), self._count(), start, end, self._peak_live)

    def _loss_sum(self) -> float:
        """The microbatches' losses added in their order, as float64."""
        losses = [self._losses[k] for k in sorted(self._losses)]
        if len({loss.device for loss in losses}) > 1:  # as of a microbatch without labels: torch.zeros(())
            losses = [loss.cpu() for loss in losses]
        return float(sum(torch.stack(losses).tolist())) if losses else 0.0

    def _count(self) -> int:
        """Items in the losses: those that a loss function counted on the device are waited for here only."""
        late = [count.double() for count in self._counts if isinstance(count, torch.Tensor)]
        found = torch.stack(late).tolist() if late else []
        return sum(map(whole_count, found)) + sum(count for count in self._counts if isinstance(count, int))

    def place(self, look: bool) -> Place:
        """The operation this rank is at, and its open requests. ``look``: these may be tested."""
        if self._phase != "in":
            at = f"{self._phase} {self._run_name}".rstrip()
        elif self._story:
            op = self._story[-1]
            at = f"at {op} (row {op.row}, {self._run_name})"
        else:
            at = f"at the beginning of {self._run_name}"
        return Place(at, self.mail.describe(look), self.mail.held_up())

    def _begin(self, program: RankProgram, feed: Feed) -> None:
        self._feed, self._draw = feed, feed.draw
        self._training = not program.forward_only
        self._first_trained = program.first_trained
        self._outputs: dict[tuple[int, int], Activation] = {}
        self._gradients: dict[tuple[int, int], Gradients] = {}
        self._held: dict[tuple[int, int], list[Buffer]] = {}
        self._losses: dict[int, torch.Tensor] = {}
        self._counts: list[int | torch.Tensor] = []
        self._live = self._peak_live = 0
        self._story.clear()
        self._timed.clear()
        self._device.anchor()
        self._device.take_copies()  # between runs, or of one that failed
        for stage in self._stages.values():
            stage.drop_kept()  # of a run that failed
            stage.split(stage.index in program.split)
        numbers = self._agreement.number(feed.signatures(self._training))
        self._agreement.begin(self._training, feed.rows, numbers)
        self.mail.begin(program.receives, numbers)

    # --- handlers: one a kind ---

    def _forward(self, op: Op) -> None:
        index, k = op.stage, op.microbatch
        stage = self._stages[index]
        value: Activation | Nested = self._outputs.pop((index, k)) if index else self._feed.inputs(k)
        target = self._feed.targets(k) if index == self._last else None
        key = MicrobatchKey(k, self._draw)
        t0 = self._stamp()
        if self._training:
            output = stage.forward(value, key)
            if index >= self._first_trained:
                self._live += 1
                self._peak_live = max(self._peak_live, self._live)
        else:
            output = stage.evaluate(value, key)
        if index == self._last:
            self._losses[k], count = stage.loss(k, output, target, keep=self._training)
            self._counts.append(count)
        else:
            self._outputs[(index + 1, k)] = output
        self._record(_F, t0, op)
        if not self._training or index < self._first_trained:
            self._release(index, k)  # nothing is kept; a buffer that the output lies in is not used again

    def _let_go(self, op: Op) -> None:
        """The backward of a frozen stage with no trainable one before it: nothing to compute."""
        t0 = time.perf_counter_ns()
        late = self.mail.wait_taken(op.stage, op.microbatch)
        t1 = time.perf_counter_ns()
        if late:
            sent, nbytes = late
            self.recorder.record(
                _SEND_WAIT, t0, t1, op.row, op.stage, op.chunk, op.microbatch, sent.peer, nbytes, sent.ordinal
            )
        kind = int(EventKind[op.kind.name])
        self.recorder.record(kind, t1, time.perf_counter_ns(), op.row, op.stage, op.chunk, op.microbatch)

    def _backward(self, op: Op) -> None:
        index, k = op.stage, op.microbatch
        if index < self._first_trained:
            return self._let_go(op)
        gradients = None if index == self._last else self._gradients.pop((index, k))
        t0 = self._stamp()
        gradients = self._stages[index].backward(k, gradients)
        self._live -= 1
        self._record(_B, t0, op)
        self._release(index, k)
        if index > self._first_trained:
            self._gradients[(index - 1, k)] = gradients

    def _backward_input(self, op: Op) -> None:
        """As ``_backward``; the buffers stay until the weight half."""
        index, k = op.stage, op.microbatch
        if index < self._first_trained:
            return self._let_go(op)
        gradients = None if index == self._last else self._gradients.pop((index, k))
        t0 = self._stamp()
        gradients = self._stages[index].backward_input(k, gradients)
        self._record(_I, t0, op)
        if index > self._first_trained:
            self._gradients[(index - 1, k)] = gradients

    def _backward_weight(self, op: Op) -> None:
        index, k = op.stage, op.microbatch
        if index < self._first_trained:
            return self._let_go(op)
        t0 = self._stamp()
        self._stages[index].backward_weight(k)
        self._live -= 1
        self._record(_W, t0, op)
        self._release(index, k)

    def _record(self, kind: int, t0: Stamp, op: Op) -> None:
        """One action that computes, from ``t0`` to the last thing issued; where the device has a clock of its own,
        once the run is over.
        """
        t1 = self._stamp()
        if self._is_timed:
            self._timed.append((kind, t0, t1, op))
        else:
            self.recorder.record(kind, t0, t1, op.row, op.stage, op.chunk, op.microbatch)

    def _record_timed(self) -> None:
        """Wait until the device has done all, and record when it did."""
        self._device.finish()
        time_ns = self._device.time_ns
        for kind, t0, t1, op in self._timed:
            self.recorder.record(
                kind,
                time_ns(t0),
                time_ns(t1),
                op.row,
                op.stage,
                op.chunk,
                op.microbatch,
                flags=FLAG_DEVICE_TIME,
            )
        self._timed.clear()
        for copy in self._device.take_copies():
            kind = _COPY_TO_HOST if copy.to_host else _COPY_TO_DEVICE
            times = time_ns(copy.begun), time_ns(copy.ended)
            self.recorder.record(kind, *times, nbytes=copy.nbytes, flags=FLAG_DEVICE_TIME)

    def _release(self, index: int, microbatch: int) -> None:
        for buffer in self._held.pop((index, microbatch), ()):
            self.mail.pool.give(buffer)

    def _send_activation(self, op: Op) -> None:
        t0 = time.perf_counter_ns()
        nbytes = self.mail.send_activation(op, self._outputs.pop((op.stage + 1, op.microbatch)))
        self._record_message(_SEND_POST, t0, op, nbytes, 0)

    def _send_gradient(self, op: Op) -> None:
        t0 = time.perf_counter_ns()
        nbytes = self.mail.send_gradient(op, self._gradients.pop((op.stage - 1, op.microbatch)))
        self._record_message(_SEND_POST, t0, op, nbytes, FLAG_GRADIENT)

    def _receive_activation(self, op: Op) -> None:
        t0 = time.perf_counter_ns()
        self._agreement.check()
        key = (op.stage, op.microbatch)
        self._outputs[key], self._held[key], nbytes = self.mail.receive_activation(op)
        self._record_message(_RECV_WAIT, t0, op, nbytes, 0)

    def _receive_gradient(self, op: Op) -> None:
        t0 = time.perf_counter_ns()
        self._agreement.check()
        key = (op.stage, op.microbatch)
        self._gradients[key], buffers, nbytes = self.mail.receive_gradient(op)
        held = self._held.get(key)
        self._held[key] = buffers if held is None else held + buffers
        self._record_message(_RECV_WAIT, t0, op, nbytes, FLAG_GRADIENT)

    def _record_message(self, kind: int, t0: int, op: Op, nbytes: int, flags: int) -> None:
        t1 = time.perf_counter_ns()
        self.recorder.record(
            kind, t0, t1, op.row, op.stage, op.chunk, op.microbatch, op.peer, nbytes, op.ordinal, flags
        )

    def _finish_sends(self) -> None:
        t0 = time.perf_counter_ns()
        late = self.mail.finish()
        self._agreement.finish()
        if late:
            op, nbytes = late[-1]
            self.recorder.record(_SEND_WAIT, t0, time.perf_counter_ns(), peer=op.peer, nbytes=nbytes)

    def _check_empty(self) -> None:
        if self._outputs or self._gradients or self._held or self._live:
            raise EngineError(
                f"the run left something over: (stage, microbatch) of outputs {list(self._outputs)}, gradients "
                f"{list(self._gradients)}, "
                f"buffers {list(self._held)}; {self._live} microbatches without backward"
            )
