"""Activations and gradients on their way between ranks: receives posted early, sends that never block, buffers used
again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch

from mpipipe.device import Buffer, BufferPool, Device
from mpipipe.engine.program import Op
from mpipipe.errors import MessageMismatchError, TransportError
from mpipipe.schedule import Kind
from mpipipe.transport import Request, Transport, open_text

RECEIVES_AHEAD = 2
"""Receives that are open beyond the one the rank needs next."""

SIZES_KEPT = 16
"""Sizes of receive buffers that are kept from run to run. Where more have come by, as with sequences of ever new
lengths, all free ones are let go before the next run.
"""

_MAX_DIMENSIONS = 14
_HEADER_BYTES = 8 * (2 + _MAX_DIMENSIONS)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape and dtype of a message's tensor."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize

    def pack(self, header: Buffer) -> None:
        words = [_DTYPES.index(self.dtype), len(self.sizes), *self.sizes]
        header.memory.view(np.int64)[: len(words)] = words

    @classmethod
    def unpack(cls, header: Buffer) -> Shape:
        words = header.memory.view(np.int64).tolist()
        return cls(tuple(words[2 : 2 + words[1]]), _DTYPES[words[0]])

    @classmethod
    def of(cls, tensor: torch.Tensor, op: Op) -> Shape:
        if tensor.dtype not in _DTYPES or tensor.dim() > _MAX_DIMENSIONS:
            raise MessageMismatchError(
                f"{op.name} holds a {tensor.dtype} tensor of {tensor.dim()} dimensions; between stages go "
                "floating-point and complex tensors of at "
                f"most {_MAX_DIMENSIONS} dimensions",
                message=op.name,
            )
        return cls(tuple(tensor.shape), tensor.dtype)


class ShapeBook:
    """The shape of each stage's output for each signature of a microbatch.

    A signature that is new when a run begins has a header before each of its activations in that run; sender and
    receiver write down the same, so both know alike when a header is due. A gradient has the shape of the activation
    that it belongs to.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, Hashable], Shape] = {}
        self._new: dict[tuple[int, Hashable], Shape] = {}

    def begin_run(self) -> None:
        self._known.update(self._new)
        self._new.clear()

    def agreed(self, stage: int, signature: Hashable) -> Shape | None:
        """The shape that was known before this run began."""
        return self._known.get((stage, signature))

    def find(self, stage: int, signature: Hashable) -> Shape | None:
        """The shape, if anything is known by now."""
        return self._known.get((stage, signature)) or self._new.get((stage, signature))

    def learn(self, stage: int, signature: Hashable, shape: Shape) -> None:
        self._new[(stage, signature)] = shape


@dataclass(slots=True)
class _Receive:
    """An open receive: of the header first (``shape`` None), then of the tensor."""

    op: Op
    request: Request
    buffer: Buffer
    shape: Shape | None


@dataclass(slots=True)
class _Send:
    op: Op
    request: Request
    buffer: Buffer
    release: list[Buffer] = field(default_factory=list)


def _is_complete(request: Request) -> bool:
    try:
        return request.test()
    except TransportError:
        return False


class Mail:
    """All messages of one rank in one run of a table."""

    def __init__(self, transport: Transport, device: Device) -> None:
        self._transport = transport
        self._device = device
        self.pool = BufferPool(device)
        self.shapes = ShapeBook()
        self._open: dict[int, _Receive] = {}  # by id of the operation
        self._sends: deque[_Send] = deque()
        self._receives: tuple[Op, ...] = ()
        self._next = 0
        self._signatures: list[Hashable] = []
        self._sizes: set[int] = set()

    def begin(self, receives: tuple[Op, ...], signatures: list[Hashable]) -> None:
        """Start a run: ``signatures`` has one entry a microbatch."""
        self._receives, self._signatures, self._next = receives, signatures, 0
        self.shapes.begin_run()
        if len(self._sizes) > SIZES_KEPT:
            self.pool.drop_all()
            self._sizes.clear()
        self._post_ahead()

    def _take(self, nbytes: int) -> Buffer:
        self._sizes.add(nbytes)
        return self.pool.take(nbytes)

    def _post_ahead(self) -> None:
        while self._next < len(self._receives) and len(self._open) <= RECEIVES_AHEAD:
            if not self._post(self._receives[self._next]):
                return
            self._next += 1

    def _post(self, op: Op) -> bool:
        """Open the receive; False when its shape can't be known yet."""
        signature = self._signatures[op.microbatch]
        if op.kind == Kind.RECV_F:
            shape = self.shapes.agreed(op.stage - 1, signature)
            tag = op.tag if shape else op.tag + 1
        else:
            shape, tag = self.shapes.find(op.stage, signature), op.tag
            if shape is None:
                return False
        buffer = self._take(shape.nbytes if shape else _HEADER_BYTES)
        self._open[id(op)] = _Receive(op, self._transport.irecv(buffer.memory, op.peer, tag), buffer, shape)
        return True

    def receive(self, op: Op) -> tuple[torch.Tensor, Buffer]:
        """Wait for a message: its tensor, and the buffer that holds it, which the caller gives back to ``pool``."""
        if id(op) not in self._open:
            posted = self._post(op)
            assert posted, f"{op}: the shape of what this stage has sent is known"
            self._next += 1
        entry = self._open.pop(id(op))
        what = f"{op.name} of rank {op.peer}"
        self._transport.wait(entry.request, what)
        if entry.shape is None:
            entry = self._after_header(entry, what)
        assert entry.shape is not None
        self._post_ahead()
        return self._device.tensor(entry.buffer, entry.shape.sizes, entry.shape.dtype), entry.buffer

    def _after_header(self, entry: _Receive, what: str) -> _Receive:
        op, shape = entry.op, Shape.unpack(entry.buffer)
        self.pool.give(entry.buffer)
        self.shapes.learn(op.stage - 1, self._signatures[op.microbatch], shape)
        buffer = self._take(shape.nbytes)
        request = self._transport.irecv(buffer.memory, op.peer, op.tag)
        self._transport.wait(request, what)
        return _Receive(op, request, buffer, shape)

    def send(self, op: Op, tensor: torch.Tensor, release: list[Buffer]) -> int:
        """Begin to send; ``release`` goes back to the pool when the send is complete. Returns the bytes of the
        message.
        """
        self.reap()
        if op.kind == Kind.SEND_F:
            agreed = self.shapes.agreed(op.stage, self._signatures[op.microbatch])
            if agreed is None or agreed.dtype != tensor.dtype or agreed.sizes != tensor.shape:
                self._announce(op, Shape.of(tensor, op))
        buffer = self._device.outgoing(tensor)
        request = self._transport.isend(buffer.memory, op.peer, op.tag)
        self._sends.append(_Send(op, request, buffer, release))
        return buffer.nbytes

    def _announce(self, op: Op, shape: Shape) -> None:
        signature = self._signatures[op.microbatch]
        known = self.shapes.find(op.stage, signature)
        if known is not None and known != shape:
            raise MessageMismatchError(
                f"{op.name} has shape {shape.sizes} {shape.dtype}, and had {known.sizes} {known.dtype} for a "
                "microbatch of the same "
                "input shapes before: a layer's output shape may depend on its input's shape only",
                peer=op.peer,
                message=op.name,
            )
        if self.shapes.agreed(op.stage, signature) is None:
            header = self._take(_HEADER_BYTES)
            shape.pack(header)
            self.shapes.learn(op.stage, signature, shape)
            self._sends.append(_Send(op, self._transport.isend(header.memory, op.peer, op.tag + 1), header, [header]))

    def reap(self) -> None:
        """Give back what completed sends held, oldest first."""
        while self._sends and self._sends[0].request.test():
            for buffer in self._sends.popleft().release:
                self.pool.give(buffer)

    def wait_taken(self, stage: int, microbatch: int) -> tuple[Op, int] | None:
        """Wait until the activation that ``stage`` sent has been taken; its (operation, bytes) if it was still open.

        In place of the gradient that a frozen stage does not get: a rank can be ahead of the next one by as many
        activations as the table has it.
        """
        self.reap()
        late = None
        for entry in self._sends:
            if (entry.op.kind, entry.op.stage, entry.op.microbatch) == (Kind.SEND_F, stage, microbatch):
                self._transport.wait(entry.request, f"rank {entry.op.peer} to take {entry.op.name}")
                late = (entry.op, entry.buffer.nbytes)
        self.reap()
        return late

    def describe(self, look: bool) -> str:
        """The open requests in words, but for the receive that is waited for; with ``look`` without those that have
        completed meanwhile.
        """
        receives = [entry for entry in list(self._open.values()) if not (look and _is_complete(entry.request))]
        sends = [entry for entry in list(self._sends) if not (look and _is_complete(entry.request))]
        taken = dict.fromkeys(f"{entry.op.name} to rank {entry.op.peer}" for entry in sends)  # a header is no other one
        return open_text([f"{entry.op.name} of rank {entry.op.peer}" for entry in receives], list(taken))

    def finish(self) -> list[tuple[Op, int]]:
        """Wait until every send is complete; the (operation, bytes) of those that were still open."""
        self.reap()
        late = []
        while self._sends:
            entry = self._sends[0]
            self._transport.wait(entry.request, f"rank {entry.op.peer} to take {entry.op.name}")
            late.append((entry.op, entry.buffer.nbytes))
            self.reap()
        return late
