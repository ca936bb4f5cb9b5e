"""Activations and gradients on their way between ranks: receives posted early, sends that never block, buffers used
again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from mpipipe.device import Buffer, BufferPool, Device, HostMemory
from mpipipe.engine.forms import HEADER_BYTES, Form, FormBook, Part, header_bytes, mismatch
from mpipipe.engine.lanes import Deferred, Landing, Lane
from mpipipe.engine.program import Op
from mpipipe.engine.window import RECEIVE_AHEAD_BYTES, RECEIVES_OPEN, Window
from mpipipe.errors import TransportError
from mpipipe.schedule import Kind
from mpipipe.stage import Activation, Gradients
from mpipipe.transport import Request, Transport, open_text

SIZES_KEPT = 16
"""Sizes of receive buffers that are kept from run to run. Where more have come by, as with sequences of ever new
lengths, all free ones are let go before the next run.
"""


SENDS_AHEAD = 4
"""So many sends may wait for the device to make them; then the host waits for the first. Else a row without receives,
as of an evaluation, would be issued as a whole, with memory for all its messages.
"""


@dataclass(slots=True)
class _Receive:
    """An open receive: of an activation of ``form``, of its gradient, or of the ``header`` (``form`` None)."""

    op: Op
    requests: list[Request]
    buffers: list[Buffer]
    form: Form | None
    nbytes: int
    header: HostMemory | None = None


@dataclass(slots=True)
class _Send:
    op: Op
    requests: list[Request]
    buffers: list[Buffer]
    nbytes: int


class _Advancing:
    """What is waited for, ``done``, while other messages begin and go on."""

    __slots__ = ("_advance", "_done", "peer")

    def __init__(self, done: Callable[[], bool], peer: int, advance: Callable[[], None]) -> None:
        self._done = done
        self._advance = advance
        self.peer = peer

    def test(self) -> bool:
        self._advance()
        return self._done()


def _all_complete(requests: list[Request]) -> bool:
    try:
        return all(request.test() for request in requests)
    except TransportError:
        return False


def _peer(entry: _Receive | _Send) -> str:
    waits = any(isinstance(request, Deferred) and not request.has_begun() for request in entry.requests)
    return f"{entry.op.peer} (not begun)" if waits else str(entry.op.peer)


def _header_memory(nbytes: int = HEADER_BYTES) -> HostMemory:
    return np.zeros(nbytes, dtype=np.uint8)


class Mail:
    """All messages of one rank in one run of a table.

    The tensors of a message go one after another, each out of and into memory of its own. ``pool`` holds the buffers
    that activations and gradients are received into. Where the device computes on its own time, a send begins once its
    bytes are there and a receive once nobody reads its memory any more, each in its turn; the rank goes on meanwhile.
    """

    def __init__(self, transport: Transport, device: Device, ahead_bytes: int = RECEIVE_AHEAD_BYTES) -> None:
        self._transport = transport
        self._device = device
        self.pool = BufferPool(device)
        self.forms = FormBook()
        self._window = Window(ahead_bytes)
        self._open: deque[_Receive] = deque()  # in the order in which they are taken
        self._sends: deque[_Send] = deque()
        self._outward, self._inward = Lane(), Lane()
        self._lands = False
        self._receives: tuple[Op, ...] = ()
        self._next = 0
        self._signatures: Sequence[int] = ()

    def begin(self, receives: tuple[Op, ...], signatures: Sequence[int]) -> None:
        """Start a run: ``signatures`` has one entry a microbatch, the same number for microbatches of one form."""
        self._receives, self._signatures, self._next = receives, signatures, 0
        self._open.clear()
        self._window.clear()
        self.forms.begin_run()
        if self.pool.num_sizes > SIZES_KEPT:
            self.pool.drop_all()
        self._post_ahead()

    # --- receives ---

    def _post_ahead(self) -> None:
        """Open receives in the order of the program, as far as the window reaches and forms are known."""
        receives, window = self._receives, self._window
        while self._next < len(receives) and window.open < RECEIVES_OPEN:
            if not self._post(receives[self._next]):
                return

    def _post(self, op: Op, *, needed: bool = False) -> bool:
        """Open the next receive: of the tensors, or of a header where the form was not known before this run. False
        where the window has no room for it, and for the gradient of what was not sent yet.
        """
        signature = self._signatures[op.microbatch]
        if op.kind == Kind.RECV_F:
            form = self.forms.agreed.get((op.stage - 1, signature))
            if form is None:
                self._window.take(0, needed=True)
                memory = _header_memory()
                request = self._transport.irecv(memory, op.peer, op.tag + 1)
                self._open.append(_Receive(op, [request], [], None, 0, memory))
                self._next += 1
                return True
            parts, nbytes = form.parts, form.nbytes
        else:
            form = self.forms.find(op.stage, signature)
            if form is None:
                return False
            parts, nbytes = form.gradient, form.gradient_nbytes
        if not self._window.take(nbytes, needed=needed):
            return False
        requests, buffers = self._irecv(op, parts)
        self._open.append(_Receive(op, requests, buffers, form, nbytes))
        self._next += 1
        return True

    def _irecv(self, op: Op, parts: tuple[Part, ...]) -> tuple[list[Request], list[Buffer]]:
        requests, buffers = [], []
        for part in parts:
            buffer = self.pool.take(part.nbytes)
            if buffer.free is None and not self._inward.waiting:
                requests.append(self._receive_into(buffer, op))
            else:
                requests.append(self._inward.add(buffer.free, partial(self._receive_into, buffer, op), op.peer))
            buffers.append(buffer)
        return requests, buffers

    def _receive_into(self, buffer: Buffer, op: Op) -> Request:
        parts = self._device.receiving_parts(buffer)
        if not parts[0].landing:
            return self._transport.irecv(parts[0].message, op.peer, op.tag)
        self._lands = True
        requests = [self._transport.irecv(part.message, op.peer, op.tag) for part in parts]
        return Landing(requests, parts, self._device)

    def receive_activation(self, op: Op) -> tuple[Activation, list[Buffer], int]:
        """Wait for an activation: it, the buffers that hold it, which the caller gives back to ``pool``, and its bytes.
        """
        entry = self._take(op)
        if entry.form is None:
            entry = self._after_header(entry)
        form = entry.form
        assert form is not None
        return Activation(self._tensors(entry, form.parts), form.needs, form.spec), entry.buffers, form.nbytes

    def receive_gradient(self, op: Op) -> tuple[Gradients, list[Buffer], int]:
        """Wait for a gradient: one entry for each tensor of the activation; buffers and bytes, as for an activation."""
        entry = self._take(op)
        form = entry.form
        assert form is not None
        tensors = self._tensors(entry, form.gradient)
        if not tensors:  # no message at all, and nothing that holds this rank back
            self.wait_taken(op.stage, op.microbatch)
        if len(tensors) == len(form.needs):
            return tensors, entry.buffers, entry.nbytes
        rest = iter(tensors)
        return [next(rest) if needed else None for needed in form.needs], entry.buffers, entry.nbytes

    def _take(self, op: Op) -> _Receive:
        """The receive of ``op``, complete. The next one is opened first: the rank may have time as long as it waits,
        and none once the message is there.
        """
        if not self._open:  # a gradient whose form was not known any earlier
            self._post(op, needed=True)
        entry = self._open.popleft()
        assert entry.op is op, f"{op} is not the next receive, {entry.op} is"
        self._window.give(entry.nbytes)
        if self._next < len(self._receives):
            self._post_ahead()
        for request in entry.requests:
            if not request.test():
                self._wait(request, f"{op.name} of rank {op.peer}")
        return entry

    def _tensors(self, entry: _Receive, parts: tuple[Part, ...]) -> list[torch.Tensor]:
        tensor = self._device.tensor
        return [tensor(buffer, part.sizes, part.dtype) for buffer, part in zip(entry.buffers, parts, strict=True)]

    def _after_header(self, entry: _Receive) -> _Receive:
        assert entry.header is not None
        op, header = entry.op, entry.header.tobytes()
        rest = header_bytes(header) - HEADER_BYTES
        if rest > 0:
            memory = _header_memory(rest)
            self._wait(self._transport.irecv(memory, op.peer, op.tag + 1), f"{op.name} of rank {op.peer}")
            header += memory.tobytes()
        form = Form.unpack(header)
        self.forms.learn(op.stage - 1, self._signatures[op.microbatch], form)
        requests, buffers = self._irecv(op, form.parts)
        for request in requests:
            self._wait(request, f"{op.name} of rank {op.peer}")
        return _Receive(op, requests, buffers, form, 0)

    def _wait(self, request: Request, what: str) -> None:
        if self._outward.waiting or self._inward.waiting or self._lands:
            request = _Advancing(request.test, request.peer, self._advance)
        self._transport.wait(request, what)

    def _advance(self) -> None:
        """Begin what can begin by now, and send what has arrived on its way. Never blocks."""
        self._outward.advance()
        self._inward.advance()
        if self._lands:
            for entry in self._open:
                for request in entry.requests:
                    request.test()

    # --- sends ---

    def send_activation(self, op: Op, activation: Activation) -> int:
        """Begin to send; leave its tensors unchanged from here on. Returns the bytes of the message."""
        key = (op.stage, self._signatures[op.microbatch])
        agreed = self.forms.agreed.get(key)
        if agreed is None:
            self._announce(op, activation, key)
        elif not agreed.fits(activation):
            raise mismatch(op.name, Form.of(activation), agreed)
        return self._send(op, activation.tensors)

    def send_gradient(self, op: Op, gradients: Gradients) -> int:
        """As ``send_activation``."""
        return self._send(op, gradients)

    def _send(self, op: Op, tensors: Sequence[torch.Tensor | None]) -> int:
        entry = _Send(op, [], [], 0)
        for tensor in tensors:
            if tensor is None:
                continue
            for buffer in self._device.outgoing_parts(tensor):
                if buffer.ready is None and not self._outward.waiting:
                    request = self._transport.isend(buffer.message, op.peer, op.tag)
                else:
                    begin = partial(self._transport.isend, buffer.message, op.peer, op.tag)
                    request = self._outward.add(buffer.ready, begin, op.peer)
                entry.requests.append(request)
                entry.buffers.append(buffer)
                entry.nbytes += buffer.nbytes
        self._sends.append(entry)
        while len(self._outward.waiting) > SENDS_AHEAD:
            first = self._outward.waiting[0]
            begins = _Advancing(first.has_begun, first.peer, self._advance)
            self._transport.wait(begins, f"its device to make {op.name}")
        self.reap()  # once the message has gone
        return entry.nbytes

    def _announce(self, op: Op, activation: Activation, key: tuple[int, int]) -> None:
        """Send the form of a signature that was new when the run began."""
        form = self.forms.find(*key)
        if form is None:
            form = Form.of(activation)
            self.forms.learn(*key, form)
        elif not form.fits(activation):
            raise mismatch(op.name, Form.of(activation), form)
        packed = form.pack(op.name)
        memory = _header_memory(max(HEADER_BYTES, len(packed)))
        memory[: len(packed)] = np.frombuffer(packed, dtype=np.uint8)
        requests = [self._transport.isend(memory[:HEADER_BYTES], op.peer, op.tag + 1)]
        if len(packed) > HEADER_BYTES:
            requests.append(self._transport.isend(memory[HEADER_BYTES:], op.peer, op.tag + 1))
        self._sends.append(_Send(op, requests, [], 0))

    def reap(self) -> None:
        """Let go of what completed sends held, oldest first."""
        sends = self._sends
        while sends:
            for request in sends[0].requests:
                if not request.test():
                    return
            for buffer in sends.popleft().buffers:
                self._device.sent(buffer)

    def poll(self) -> None:
        """Let messages under way move on, while the rank computes. Never blocks."""
        if self._sends or self._open:
            if self._outward.waiting or self._inward.waiting or self._lands:
                self._advance()
            self._transport.poll()

    def wait_taken(self, stage: int, microbatch: int) -> tuple[Op, int] | None:
        """Wait until the activation that ``stage`` sent has been taken; its (operation, bytes) if it was still open.

        In place of a gradient that does not come, to a frozen stage or for an output that takes none: a rank can be
        ahead of the next one by as many activations as the table has it.
        """
        self.reap()
        late = None
        for entry in self._sends:
            if (entry.op.kind, entry.op.stage, entry.op.microbatch) == (Kind.SEND_F, stage, microbatch):
                self._await_taken(entry)
                late = (entry.op, entry.nbytes)
        self.reap()
        return late

    def _await_taken(self, entry: _Send) -> None:
        for request in entry.requests:
            self._wait(request, f"rank {entry.op.peer} to take {entry.op.name}")

    def describe(self, look: bool) -> str:
        """The open requests in words, but for the receive that is waited for; with ``look`` without those that have
        completed meanwhile. Those that wait for the device have not begun.
        """
        receives = [entry for entry in list(self._open) if not (look and _all_complete(entry.requests))]
        sends = [entry for entry in list(self._sends) if not (look and _all_complete(entry.requests))]
        taken = dict.fromkeys(f"{entry.op.name} to rank {_peer(entry)}" for entry in sends)  # a header is no other one
        return open_text([f"{entry.op.name} of rank {_peer(entry)}" for entry in receives], list(taken))

    def held_up(self) -> tuple[int, ...]:
        """Ranks whose messages wait for this one's device."""
        lanes = (self._outward, self._inward)
        return tuple(sorted({deferred.peer for lane in lanes for deferred in list(lane.waiting)}))

    def finish(self) -> list[tuple[Op, int]]:
        """Wait until every send is complete; the (operation, bytes) of those that were still open."""
        self.reap()
        late = []
        while self._sends:
            entry = self._sends[0]
            self._await_taken(entry)
            late.append((entry.op, entry.nbytes))
            self.reap()
        return late
