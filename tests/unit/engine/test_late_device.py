"""The engine on a device whose work is done late: messages wait for their bytes, memory for its readers, and nothing
for anything else. The same numbers as on the host, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import little
import pytest
import torch
from fakes.late import LateDriver
from fakes.late_stage import late_stage
from torch import nn

from mpipipe.device import Buffer, Device, HostDevice, StreamDevice, streams
from mpipipe.device.slots import capacity
from mpipipe.engine import Engine, RunResult, compile_program
from mpipipe.engine.window import buffers_needed
from mpipipe.errors import EngineError
from mpipipe.formats.trace import FLAG_DEVICE_TIME, EventKind
from mpipipe.schedule import ScheduleTable, build, forward_only
from mpipipe.stage import Stage, StageLayer
from mpipipe.topology import stages_on
from mpipipe.trace import Recorder
from mpipipe.trainer.feed import TensorFeed
from mpipipe.transport import Transport, run_ranks

TABLES = [
    ("gpipe", 3, 1, 5),
    ("1f1b", 2, 1, 4),
    ("1f1b", 4, 1, 9),
    ("interleaved", 2, 2, 4),
    ("zb-h1", 3, 1, 6),
    ("zb-v", 2, 2, 5),
]

Found = tuple[dict[str, torch.Tensor], list[RunResult], list[str]]


def run(table: ScheduleTable, device_of: Callable[[int], Device], *, runs: int = 3, ahead: int = 1 << 20) -> Found:
    """Totals by parameter, each rank's last result, and what the late drivers have seen, of all ranks."""

    def work(transport: Transport) -> tuple[dict[str, torch.Tensor], RunResult, list[str]]:
        device = device_of(transport.rank)
        driver = device._driver if isinstance(device, StreamDevice) else None
        last = table.num_stages - 1
        stages = {}
        for stage in stages_on(table.placement, transport.rank):
            torch.manual_seed(100 + stage)
            layers = [StageLayer(nn.Sequential(nn.Linear(little.WIDTH, little.WIDTH), nn.Tanh()), stage, str(stage))]
            made = Stage(stage, layers, device, little.square_loss if stage == last else None)
            stages[stage] = late_stage(made, driver) if isinstance(driver, LateDriver) else made
        engine = Engine(transport, device, Recorder(None), stages, table.num_stages, receive_ahead_bytes=ahead)
        program = compile_program(table, transport.rank)
        for number in range(runs):
            feed = TensorFeed(little.batch(number, 2 * table.m), 2, device, draw_seed=1)
            result = engine.run(program, feed)
        device.finish()
        found = [] if not isinstance(driver, LateDriver) else driver.violations
        totals = {
            name: gradient.finish().clone()
            for stage in stages.values()
            for layer in stage.layers
            for name, gradient in zip(layer.names, layer.gradients, strict=True)
        }
        return totals, result, found

    ranks = run_ranks(table.p, work)
    totals = {name: total for found, _, _ in ranks for name, total in found.items()}
    return totals, [result for _, result, _ in ranks], [text for _, _, texts in ranks for text in texts]


def late(seed: int, staged: bool, kind: type[StreamDevice] = StreamDevice) -> Callable[[int], Device]:
    return lambda rank: kind(LateDriver(10 * seed + rank), staged)


def same(found: Found, wanted: Found) -> bool:
    losses = [[result.loss_sum for result in results] for _, results, _ in (found, wanted)]
    return losses[0] == losses[1] and all(torch.equal(found[0][name], total) for name, total in wanted[0].items())


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("name, p, v, m", TABLES)
def test_late_work_gives_the_same_bits(name: str, p: int, v: int, m: int, staged: bool) -> None:
    table = build(name, p=p, v=v, m=m)
    wanted = run(table, lambda rank: HostDevice())
    for seed in (1, 2):
        found = run(table, late(seed, staged))
        assert not found[2]
        assert same(found, wanted)
        assert [result.peak_live for result in found[1]] == [result.peak_live for result in wanted[1]]


@pytest.mark.parametrize("part_bytes", [5, 16, 47])
def test_long_messages_go_in_parts(part_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 48 bytes here."""
    monkeypatch.setattr(streams, "PART_BYTES", part_bytes)
    for name, p, v, m in TABLES[:5]:
        table = build(name, p=p, v=v, m=m)
        found = run(table, late(part_bytes, True))
        assert not found[2]
        assert same(found, run(table, lambda rank: HostDevice()))


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("ahead", [0, 200])
def test_late_work_with_little_memory_for_messages(ahead: int, staged: bool) -> None:
    """One receive at a time: each waits for the last reader of the one buffer."""
    table = build("1f1b", p=3, m=8)
    found = run(table, late(3, staged), ahead=ahead)
    assert not found[2]
    assert same(found, run(table, lambda rank: HostDevice()))


@pytest.mark.parametrize("staged", [False, True])
def test_an_evaluation_on_a_late_device(staged: bool) -> None:
    table = forward_only((0, 1, 2), 3, 1, 6)
    found = run(table, late(4, staged))
    assert not found[2]
    assert same(found, run(table, lambda rank: HostDevice()))


class SendsEarly(StreamDevice):
    """A send does not wait for its bytes."""

    def outgoing(self, tensor: torch.Tensor) -> Buffer:
        buffer = super().outgoing(tensor)
        buffer.ready = None
        return buffer


class ReceivesEarly(StreamDevice):
    """A receive does not wait for the last readers of its memory."""

    def release(self, buffer: Buffer) -> None:
        super().release(buffer)
        buffer.free = None


@pytest.mark.parametrize("staged", [False, True])
def test_a_send_before_its_bytes_shows(staged: bool) -> None:
    table = build("1f1b", p=3, m=8)
    wanted = run(table, lambda rank: HostDevice())
    assert not all(same(run(table, late(seed, staged, SendsEarly)), wanted) for seed in range(3))


def test_a_receive_before_the_last_reader_shows() -> None:
    table = build("1f1b", p=3, m=8)
    assert any(run(table, late(seed, False, ReceivesEarly), ahead=0)[2] for seed in range(5))


def test_the_host_does_not_wait_for_what_was_computed() -> None:
    """On one rank no message makes it wait: all is issued before anything is done."""
    drivers = []

    def device_of(rank: int) -> Device:
        drivers.append(LateDriver(rank))
        return StreamDevice(drivers[-1], True)

    table = build("1f1b", p=1, m=4)
    seen: list[int] = []

    def work(transport: Transport) -> None:
        device = device_of(0)
        driver = drivers[-1]
        stage = late_stage(
            Stage(0, [StageLayer(nn.Linear(little.WIDTH, little.WIDTH), 0, "0")], device, little.square_loss), driver
        )
        engine = Engine(transport, device, Recorder(None), {0: stage}, 1)
        finish = device.finish

        def counted() -> None:
            seen.append(sum(len(queue) for queue in driver._queues.values()))
            finish()

        device.finish = counted  # type: ignore[method-assign]
        engine.run(compile_program(table, 0), TensorFeed(little.batch(0, 4), 1, device, draw_seed=1))

    run_ranks(1, work)
    assert seen == [4 * 7]  # of each microbatch F, loss and B, and stamps before and after F and B


class Kept(Recorder):
    """Keeps what is recorded."""

    __slots__ = ("events",)

    def __init__(self) -> None:
        super().__init__(None)
        self.events: list[tuple[int, int, int, int]] = []

    def record(self, kind: int, t0_ns: int, t1_ns: int, *rest: int, **named: int) -> None:
        self.events.append((kind, t0_ns, t1_ns, rest[7] if len(rest) > 7 else named.get("flags", 0)))
        super().record(kind, t0_ns, t1_ns, *rest, **named)


@pytest.mark.parametrize("staged", [False, True])
def test_times_of_actions_are_the_devices_and_those_of_messages_the_hosts(staged: bool) -> None:
    table = build("zb-h1", p=2, m=3)

    def work(transport: Transport) -> tuple[list[tuple[int, int, int, int]], RunResult]:
        device = StreamDevice(LateDriver(transport.rank), staged)
        loss = little.square_loss if transport.rank else None
        stage = Stage(transport.rank, [StageLayer(nn.Linear(little.WIDTH, little.WIDTH), 0, "0")], device, loss)
        recorder = Kept()
        engine = Engine(transport, device, recorder, {transport.rank: late_stage(stage, device._driver)}, 2)
        program = compile_program(table, transport.rank)
        result = engine.run(program, TensorFeed(little.batch(0, 3), 1, device, draw_seed=1))
        return recorder.events, result

    for events, result in run_ranks(2, work):
        compute = [event for event in events if event[0] <= EventKind.W]
        assert [kind for kind, *_ in compute].count(EventKind.F) == 3
        assert len(compute) == 9
        assert all(flags == FLAG_DEVICE_TIME for *_, flags in compute)
        messages = (EventKind.RECV_WAIT, EventKind.SEND_POST, EventKind.SEND_WAIT)
        assert not any(flags & FLAG_DEVICE_TIME for kind, *_, flags in events if kind in messages)
        copies = [event for event in events if event[0] in (EventKind.COPY_TO_HOST, EventKind.COPY_TO_DEVICE)]
        assert len(copies) == 6 * staged  # three messages in and three out
        assert all(t0 <= t1 and flags == FLAG_DEVICE_TIME for _, t0, t1, flags in copies)
        margin_ns = 1000  # an event's time is a float32
        assert all(t0 <= t1 + margin_ns for _, t0, t1, _ in compute)
        assert all(before[2] <= after[1] + margin_ns for before, after in pairwise(compute))
        assert result.start_ns - margin_ns <= compute[0][1]
        assert compute[-1][2] <= result.end_ns + margin_ns


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("name, p", [("1f1b", 3), ("gpipe", 2), ("zb-h1", 4)])
def test_received_messages_take_the_device_memory_that_the_table_says(name: str, p: int, staged: bool) -> None:
    table, devices = build(name, p=p, m=9), {}

    def device_of(rank: int) -> Device:
        devices[rank] = StreamDevice(LateDriver(rank), staged)
        return devices[rank]

    run(table, device_of, runs=4)
    size = 2 * little.WIDTH * 4
    for rank, device in devices.items():
        needed = buffers_needed(compile_program(table, rank), lambda *_: [size], 1 << 20)[size]
        assert device._receive_slots.allocated_bytes == needed * capacity(size)
        sends = device._send_slots.allocated_bytes // capacity(size)
        assert 0 < sends <= 2 * table.m  # they go back as sends complete, however late the copies are


@pytest.mark.parametrize("count, taken", [(2, 8), (2.0, 8), (0, 0), (2.75, None), (-1, None), (float("nan"), None)])
def test_a_count_that_stays_on_the_device_is_looked_at_once_the_run_is_over(count: float, taken: int | None) -> None:
    table = build("gpipe", p=1, m=4)
    counts: list[torch.Tensor] = []

    def work(transport: Transport) -> int:
        device = StreamDevice(LateDriver(1), False)
        stage = Stage(0, [StageLayer(nn.Linear(little.WIDTH, little.WIDTH), 0, "0")], device, little.square_loss)
        loss = stage.loss

        def on_device(*args: object, keep: bool) -> tuple[torch.Tensor, torch.Tensor]:
            counts.append(torch.tensor(count))
            return loss(*args, keep=keep)[0], counts[-1]  # type: ignore[arg-type]

        stage.loss = on_device  # type: ignore[method-assign]
        engine = Engine(transport, device, Recorder(None), {0: stage}, 1)
        result = engine.run(compile_program(table, 0), TensorFeed(little.batch(0, 4), 1, device, draw_seed=1))
        return result.count

    if taken is not None:
        assert run_ranks(1, work) == [taken]
        return
    with pytest.raises(EngineError, match="a whole number is needed"):
        run_ranks(1, work)
    assert len(counts) == 4  # not in the middle


@pytest.mark.parametrize("staged", [False, True])
def test_the_host_is_not_far_ahead_of_messages_that_are_not_made(staged: bool) -> None:
    """A row without receives, as the first rank's of an evaluation: not all of it is issued before anything is done."""
    most: list[int] = []

    class Watched(StreamDevice):
        def outgoing_parts(self, tensor: torch.Tensor) -> list[Buffer]:
            most.append(sum(len(queue) for queue in self._driver._queues.values()))
            return super().outgoing_parts(tensor)

    run(forward_only((0, 1), 2, 1, 60), late(1, staged, Watched), runs=1)
    assert len(most) == 60
    assert max(most) < 60  # of some 5 for each microbatch
