"""Receive buffers: as many as the table and the window say, no more; and a window of any size trains alike."""

from __future__ import annotations

import little
import pytest
import torch
from torch import nn

from mpipipe.device import HostDevice
from mpipipe.engine import Engine, compile_program
from mpipipe.engine.window import RECEIVE_AHEAD_BYTES, RECEIVES_OPEN, Window, buffers_needed
from mpipipe.errors import ScheduleError
from mpipipe.schedule import ScheduleTable, build, forward_only, names
from mpipipe.stage import Stage, StageLayer
from mpipipe.topology import stages_on
from mpipipe.trace import Recorder
from mpipipe.trainer.feed import TensorFeed
from mpipipe.transport import Transport, run_ranks

FLOAT = 4
ROWS = 3


def width(stage: int) -> int:
    """Of what ``stage`` takes; every border has its own."""
    return little.WIDTH + stage


def message_bytes(stage: int, gradient: bool) -> int:
    return FLOAT * ROWS * width(stage + 1 if gradient else stage)


def run_twice(table: ScheduleTable, limit_bytes: int) -> list[tuple[dict[int, int], dict[int, int], int]]:
    """Of each rank: buffers of a run with known forms, those foreseen, and the bytes that were allocated."""

    def work(transport: Transport) -> tuple[dict[int, int], dict[int, int], int]:
        device, last = HostDevice(), table.num_stages - 1
        stages = {}
        for stage in stages_on(table.placement, transport.rank):
            layers = [StageLayer(nn.Linear(width(stage), width(stage + 1)), stage, str(stage))]
            stages[stage] = Stage(stage, layers, device, little.square_loss if stage == last else None)
        engine = Engine(
            transport, device, Recorder(None), stages, table.num_stages, receive_ahead_bytes=limit_bytes
        )
        program = compile_program(table, transport.rank)
        x, y = torch.randn(table.m * ROWS, width(0)), torch.randn(table.m * ROWS, width(last + 1))
        for _ in range(2):
            engine.mail.pool.drop_all()  # the first run has headers
            engine.run(program, TensorFeed((x, y), ROWS, device, draw_seed=1))
        needed = buffers_needed(program, lambda stage, _, gradient: [message_bytes(stage, gradient)], limit_bytes)
        pool = engine.mail.pool
        return {size: len(free) for size, free in pool._free.items()}, needed, pool.allocated_bytes

    return run_ranks(table.p, work)


def check(table: ScheduleTable, limit_bytes: int = RECEIVE_AHEAD_BYTES) -> None:
    for found, needed, allocated in run_twice(table, limit_bytes):
        assert found == needed
        assert allocated == sum(size * count for size, count in needed.items())


@pytest.mark.parametrize("p, m", [(2, 1), (2, 5), (3, 2), (3, 7), (4, 8)])
@pytest.mark.parametrize("name", names())
def test_a_run_takes_the_buffers_that_the_table_and_the_window_say(name: str, p: int, m: int) -> None:
    for v in (1, 2):
        try:
            table = build(name, p=p, v=v, m=m)
        except ScheduleError:
            continue
        if table.mirror is None:
            check(table)


@pytest.mark.parametrize("limit_bytes", [0, 1, 100, 400, 1 << 40])
@pytest.mark.parametrize("name, v", [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-v", 2), ("zb-h2", 1)])
def test_a_memory_budget_of_any_size_is_kept(name: str, v: int, limit_bytes: int) -> None:
    check(build(name, p=3, v=v, m=9), limit_bytes)


def test_an_evaluation_takes_few_buffers() -> None:
    check(forward_only((0, 1, 2), 3, 1, 20))
    ((found, _, _), *_) = run_twice(forward_only((1, 0), 2, 1, 20), 0)
    assert found == {message_bytes(1, gradient=False): 2}  # one in use, one open


def test_a_smaller_budget_takes_less_memory_and_a_step_without_any_the_least() -> None:
    table = build("1f1b", p=3, m=40)
    bytes_of = [[allocated for _, _, allocated in run_twice(table, limit)] for limit in (0, 200, 1 << 30)]
    assert bytes_of[0][1] <= bytes_of[1][1] <= bytes_of[2][1]
    assert bytes_of[0][2] < bytes_of[1][2] <= bytes_of[2][2]
    # Rank 1 holds two activations between F and B and one gradient, and one receive of either kind is open beside.
    assert bytes_of[0][1] == 3 * message_bytes(1, gradient=False) + 2 * message_bytes(1, gradient=True)


def test_a_window_always_takes_what_is_needed_now() -> None:
    window = Window(100)
    assert window.take(1000)
    assert not window.take(1)
    assert window.take(1000, needed=True)
    window.clear()
    assert [window.take(1) for _ in range(RECEIVES_OPEN + 1)] == [True] * RECEIVES_OPEN + [False]
    assert window.open == RECEIVES_OPEN
    window.give(1)
    assert window.take(99 - RECEIVES_OPEN)
    window.give(1)
    assert not window.take(100)
