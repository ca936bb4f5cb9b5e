"""A GPU that is late: the driver under ``StreamDevice``, made of host memory, whose work is done only as time passes.

    driver = LateDriver(seed)
    device = StreamDevice(driver, staged=True)      # or False: a transport that takes the slots' own memory
    ...
    driver.check()                                  # at the end: nothing was read too early or written too early

What a user's modules compute is computed at once, by torch on the CPU. So that the device sees it as work that goes
on, whoever computes says ``driver.kernel(reads)`` behind it: a kernel was issued, which reads the tensors ``reads``,
and will be done late. ``late_stage(stage, driver)`` of fakes.late_stage does so for all of a stage's methods.

Time passes in ``Mark.reached()`` alone, a random few pieces of work at a time, in the streams' own orders but in a
random one between streams. Copies take effect when they are done. ``wait`` on the compute stream does what it waits for
at once, because what is computed next is; without that wait the old bytes are still there. What must be ordered is
checked twice:

- When work is issued, from the marks that were waited for: a copy out of a tensor behind the last kernel, else it
  copies garbage; a copy into a slot behind the last kernel that reads the slot; a kernel behind the copy into what it
  reads.
- When work is done, by the bytes: what a kernel reads, and what a copy copies, must be as it was when it was issued;
  the tensor that a copy on its own stream reads must still belong to someone.

``violations`` lists what was found, in words. Memory is full of garbage until it is written.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from mpipipe.device import ALIGNMENT
from mpipipe.device.driver import Slot, Stream
from mpipipe.device.tensors import uses

_ALONE = uses(torch.empty(1))
"""What ``uses`` is of a tensor whose memory no other one has."""

Span = tuple[int, int]
"""An address and a number of bytes."""


@dataclass(slots=True, eq=False)
class LateMark:
    driver: LateDriver
    stream: Stream
    number: int
    clock: dict[Stream, int]
    time_ns: int = 0

    def done(self) -> bool:
        return self.driver.done[self.stream] >= self.number

    def reached(self) -> bool:
        self.driver.pass_time()
        if self.done():
            self.driver.host_saw(self)
            return True
        return False


@dataclass(slots=True)
class _Work:
    act: Callable[[], None]
    after: LateMark | None = None


def _nothing() -> None:
    pass


def _zero() -> dict[Stream, int]:
    return dict.fromkeys(Stream, 0)


def _join(clock: dict[Stream, int], other: dict[Stream, int]) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock[stream], number)


@dataclass(slots=True)
class _Place:
    """A slot, the last kernel that reads it and the last copy into it, by their numbers in their streams."""

    slot: Slot
    read: int = 0
    written: int = 0


class LateDriver:
    """``num_device``, ``num_pinned``: slots that were allocated."""

    def __init__(self, seed: int = 0) -> None:
        self.name = "late:0"
        self.identity = f"LATE-{seed}"
        self.torch_device = torch.device("cpu")
        self.generator = torch.Generator()  # what is drawn on the CPU comes from the host's, as on a GPU's node
        self.violations: list[str] = []
        self.repeats = False
        self.done = _zero()
        self.num_pinned = self.num_device = 0
        self._random = random.Random(seed)
        self._garbage = np.random.default_rng(seed)
        self._queues: dict[Stream, deque[_Work]] = {stream: deque() for stream in Stream}
        self._issued = _zero()
        self._clocks = {stream: _zero() for stream in Stream}  # what is done before what a stream does next
        self._host = _zero()  # what is done before what is issued next
        self._last_kernel = 0
        self._places: list[_Place] = []

    def check(self) -> None:
        """Raises ``AssertionError`` with the first violations, if there are any. Finishes all work first."""
        self.finish()
        assert not self.violations, "\n".join(self.violations[:5])

    # --- time ---

    def pass_time(self) -> None:
        for _ in range(self._random.choice((0, 0, 1, 1, 2, 3))):
            ready = [s for s in Stream if (queue := self._queues[s]) and ((a := queue[0].after) is None or a.done())]
            if not ready:
                return
            self._do(self._random.choice(ready))

    def _do(self, stream: Stream) -> None:
        work = self._queues[stream].popleft()
        self.done[stream] += 1
        work.act()

    def _finish(self, stream: Stream, number: int) -> None:
        """Do the work of a stream up to its ``number``, and first what that waits for."""
        while self.done[stream] < number:
            after = self._queues[stream][0].after
            if after is not None:
                self._finish(after.stream, after.number)
            self._do(stream)

    def host_saw(self, mark: LateMark) -> None:
        _join(self._host, mark.clock)

    def repeat_bits(self) -> None:
        self.repeats = True

    def finish(self) -> None:
        for stream in Stream:
            self._finish(stream, self._issued[stream])
            self._host[stream] = self._issued[stream]

    def _issue(self, stream: Stream, act: Callable[[], None], after: LateMark | None = None) -> int:
        clock = self._clocks[stream]
        _join(clock, self._host)
        if after is not None:
            _join(clock, after.clock)
        self._issued[stream] = clock[stream] = self._issued[stream] + 1
        self._queues[stream].append(_Work(act, after))
        return self._issued[stream]

    def _before(self, stream: Stream) -> dict[Stream, int]:
        """What is sure to be done before what would be issued on ``stream`` now."""
        clock = dict(self._clocks[stream])
        _join(clock, self._host)
        return clock

    # --- the driver ---

    def device_memory(self, nbytes: int) -> Slot:
        self.num_device += 1
        memory = self._memory(nbytes)
        slot = Slot(memory, memory.ctypes.data, nbytes, torch.from_numpy(memory))
        self._places.append(_Place(slot))
        return slot

    def pinned_memory(self, nbytes: int) -> Slot:
        self.num_pinned += 1
        memory = self._memory(nbytes)
        return Slot(memory, memory.ctypes.data, nbytes)

    def _memory(self, nbytes: int) -> np.ndarray:
        raw = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        memory = raw[start : start + nbytes]
        memory[:] = self._noise(nbytes)
        return memory

    def _noise(self, nbytes: int) -> np.ndarray:
        return self._garbage.integers(1, 255, nbytes, dtype=np.uint8)

    def mark(self, stream: Stream) -> LateMark:
        number = self._issue(stream, _nothing)
        return LateMark(self, stream, number, dict(self._clocks[stream]))

    def wait(self, stream: Stream, mark: LateMark) -> None:
        if stream is Stream.COMPUTE:
            self._finish(mark.stream, mark.number)
        self._issue(stream, _nothing, mark)

    def stamp(self, stream: Stream) -> LateMark:
        mark = LateMark(self, stream, 0, {})

        def tell() -> None:
            mark.time_ns = time.perf_counter_ns()

        mark.number = self._issue(stream, tell)
        mark.clock = dict(self._clocks[stream])
        return mark

    def anchor(self) -> tuple[LateMark, int]:
        mark = self.stamp(Stream.COMPUTE)
        self._finish(Stream.COMPUTE, mark.number)
        self.host_saw(mark)
        return mark, mark.time_ns

    def elapsed_ms(self, earlier: LateMark, later: LateMark) -> float:
        assert earlier.time_ns, "a stamp's time was asked for before it was reached"
        assert later.time_ns, "a stamp's time was asked for before it was reached"
        return float(np.float32((later.time_ns - earlier.time_ns) / 1e6))

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        self._finish(Stream.COMPUTE, self._issued[Stream.COMPUTE])
        _join(self._host, self._clocks[Stream.COMPUTE])
        return tensor.clone()

    def copy_out(self, target: Slot, tensor: torch.Tensor, nbytes: int, stream: Stream) -> None:
        assert tensor.is_contiguous()
        before = ctypes.string_at(tensor.data_ptr(), nbytes)
        target.memory[:nbytes] = self._noise(nbytes)
        if stream is Stream.COMPUTE:  # what the stream does later to the tensor was done at once, as was its release
            self._last_kernel = self._issue(stream, lambda: _write(target.address, before))
            return
        ordered = self._before(stream)[Stream.COMPUTE] >= self._last_kernel
        if not ordered:
            self.violations.append(f"a tensor of {nbytes} bytes is copied out before the kernel that makes it is done")
        alias = tensor.detach()

        def copy() -> None:
            now = ctypes.string_at(alias.data_ptr(), nbytes)
            if uses(alias) == _ALONE:
                self.violations.append(f"a tensor of {nbytes} bytes was let go while it was being copied out")
                now = self._noise(nbytes).tobytes()
            elif now != before:
                self.violations.append(f"a tensor of {nbytes} bytes changed while it was being copied out")
            _write(target.address, now if ordered else self._noise(nbytes).tobytes())

        self._issue(stream, copy)

    def copy_in(self, target: Slot, source: Slot, nbytes: int, stream: Stream, offset: int = 0) -> None:
        place = next(one for one in self._places if one.slot is target)
        if self._before(stream)[Stream.COMPUTE] < place.read:
            self.violations.append(f"a slot of {target.nbytes} bytes is written before its last reader is done")
        before = ctypes.string_at(source.address, nbytes)

        def copy() -> None:
            now = ctypes.string_at(source.address, nbytes)
            if now != before:
                self.violations.append(f"a message of {nbytes} bytes changed in host memory while it was copied in")
            _write(target.address + offset, now)

        place.written = self._issue(stream, copy)

    # --- what is computed ---

    def kernel(self, reads: Iterable[torch.Tensor | Span] = (), check: Callable[[], None] | None = None) -> None:
        """A kernel was issued that reads ``reads``; ``check`` is called when it is done. Tensors outside of slots are
        nothing to look after: torch orders them by the compute stream alone.
        """
        found = []
        for address, nbytes in spans(reads):
            place = self._place_of(address)
            if place is None or not nbytes:
                continue
            if self._before(Stream.COMPUTE)[Stream.IN] < place.written:
                self.violations.append(f"a kernel reads a message of {nbytes} bytes before it was copied in")
            found.append((place, address, nbytes, ctypes.string_at(address, nbytes)))

        def end() -> None:
            for _, address, nbytes, before in found:
                if ctypes.string_at(address, nbytes) != before:
                    self.violations.append(f"a message of {nbytes} bytes was overwritten while a kernel was reading it")
            if check is not None:
                check()

        self._last_kernel = self._issue(Stream.COMPUTE, end)
        for place, *_ in found:
            place.read = self._last_kernel

    def _place_of(self, address: int) -> _Place | None:
        for place in self._places:
            if place.slot.address <= address < place.slot.address + place.slot.nbytes:
                return place
        return None


def spans(tensors: Iterable[torch.Tensor | Span]) -> list[Span]:
    """Where contiguous tensors lie. Holds none of them: a tensor that is held in a slot's memory keeps the slot."""
    return [one if isinstance(one, tuple) else (one.data_ptr(), one.numel() * one.element_size()) for one in tensors]


def _write(address: int, contents: bytes) -> None:
    ctypes.memmove(address, contents, len(contents))
