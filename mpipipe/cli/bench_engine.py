"""What ``mpipipe bench engine`` measures: the engine's own time per action, on layers that compute next to nothing."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpipipe.cli.bench_p2p import about, show_about
from mpipipe.cli.output import print_table
from mpipipe.errors import ConfigError
from mpipipe.units import counted, format_seconds

if TYPE_CHECKING:
    from mpipipe.config import Config
    from mpipipe.transport import Transport

WIDTH, ROWS, WARM_STEPS = 8, 2, 5
"""Of the layers, of a microbatch, and the steps before those that count."""


def engine_config(
    num_ranks: int, *, schedule: str, chunks: int | None, microbatches: int, steps: int, trace: bool, wait: str
) -> Config:
    """The run of ``bench engine``. Raises ConfigError and ScheduleError, alike on every rank."""
    from mpipipe.config import Config
    from mpipipe.planner import AUTO
    from mpipipe.schedule.exchange import is_file, load_table, table_named
    from mpipipe.schedule.registry import family_of

    if chunks is None:
        if is_file(schedule):
            chunks = load_table(schedule).v
        else:
            chunks = 1 if schedule == AUTO else family_of(schedule)[0].default_chunks
    config = Config.from_tables(
        {
            "run": {"steps": WARM_STEPS + steps},
            "batch": {"sequences": ROWS * microbatches, "microbatch": ROWS},
            "pipeline": {"schedule": schedule, "chunks": chunks, "partition": "even"},
            "trace": {"enabled": trace},
            "comm": {"wait": wait},
        }
    ).resolve(num_ranks)
    if schedule != AUTO and table_named(schedule, p=num_ranks, v=chunks, m=microbatches).mirror is not None:
        problem = "keeps every stage on two ranks: this version draws and simulates such schedules, and runs none"
        raise ConfigError(problem, key="--schedule", value=schedule)
    return config


@contextmanager
def _shared_folder(transport: Transport) -> Iterator[Path]:
    """A new folder that rank 0 names to all; gone on every node at the end, however that comes."""
    from mpipipe.collectives import barrier, on_first_rank

    folder = Path(on_first_rank(transport, lambda: tempfile.mkdtemp(prefix="mpipipe-bench-")))
    try:
        yield folder
        barrier(transport)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure_engine(config: Config, transport: Transport) -> dict[str, Any]:
    """Steps of one Linear(8, 8) a stage, as a dict that JSON can hold; times in seconds. Collective.

    ``kinds``: means over ranks and steps of the events of the trace. ``trace``: the events of the rank that has most,
    with the time that recording takes; both null without a trace.
    """
    from mpipipe.collectives import all_gather_objects, on_first_rank
    from mpipipe.partition import describe_costs
    from mpipipe.planner import schedule_table

    m = config.num_microbatches
    stages = transport.size * config.pipeline.chunks
    table = schedule_table(config, transport.size, m, describe_costs([1.0] * stages))
    actions = int((table.offsets[1:] - table.offsets[:-1]).max())
    with _shared_folder(transport) as folder:
        run = config.run.model_copy(update={"dir": str(folder / "run")})
        times = _tiny_steps(config.model_copy(update={"run": run}), transport, stages)
        step_s = statistics.median(times)
        found = {
            **about(config, transport),
            "schedule": config.pipeline.schedule,
            "p": transport.size,
            "v": config.pipeline.chunks,
            "m": m,
            "actions_per_rank": actions,
            "steps": len(times),
            "step_s": step_s,
            "step_min_s": min(times),
            "step_max_s": max(times),
            "action_s": step_s / actions,
            "kinds": None,
            "trace": None,
        }
        if config.trace.enabled:
            mine = _events_by_kind(folder / "run", transport.rank, len(times))
            event_s = on_first_rank(transport, lambda: event_cost_s(folder / "cost"))
            _add_trace(found, all_gather_objects(transport, mine), event_s)
    return found


def _tiny_steps(config: Config, transport: Transport, stages: int) -> list[float]:
    """Seconds of each step that counts, from barrier to barrier."""
    import torch

    from mpipipe.collectives import barrier
    from mpipipe.trainer import Trainer

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        return torch.nn.functional.mse_loss(output, target, reduction="sum"), target.numel()

    trainer = Trainer(config, [partial(torch.nn.Linear, WIDTH, WIDTH)] * stages, loss_fn, transport=transport)
    batch = (torch.ones(config.batch.sequences, WIDTH), torch.zeros(config.batch.sequences, WIDTH))
    times = []
    for _ in range(config.run.steps):
        barrier(transport)
        begun = time.perf_counter()
        trainer.step(batch)
        barrier(transport)
        times.append(time.perf_counter() - begun)
    trainer.close()
    return times[WARM_STEPS:]


def _events_by_kind(run: Path, rank: int, steps: int) -> dict[str, list[float]]:
    """(events, seconds) a step of each kind in this rank's trace, over the steps that count."""
    from mpipipe.formats.paths import RunPaths
    from mpipipe.formats.trace import EventKind, read_trace

    events = read_trace(RunPaths(run).trace_file(1, rank)).events
    events = events[events["step"] > WARM_STEPS]
    found = {}
    for kind in EventKind:
        chosen = events[events["kind"] == kind]
        if len(chosen):
            length_ns = int((chosen["t1_ns"] - chosen["t0_ns"]).sum())
            found[kind.name] = [len(chosen) / steps, length_ns / steps / 1e9]
    return found


def event_cost_s(folder: Path, events: int = 50_000) -> float:
    """Seconds that the trace takes for an event: both looks at the clock, the record, and its way to the file. A trace
    file is left in ``folder``.
    """
    from mpipipe.formats.trace import TraceWriter
    from mpipipe.trace import Recorder

    header = {"rank": 0, "world_size": 1, "p": 1, "v": 1, "d": 1}
    recorder, clock, times = Recorder(TraceWriter(folder / "rank-00000.h5", header)), time.perf_counter_ns, []
    for step in range(5):
        begun = clock()
        recorder.begin_step(step, 0)
        for _ in range(events):
            t0 = clock()
            recorder.record(0, t0, clock(), 1, 2, 0, 3)
        recorder.end_step(begun, clock(), 0, None)
        recorder.flush()
        times.append(clock() - begun)
    recorder.close()
    return statistics.median(times) / events / 1e9


def _add_trace(found: dict[str, Any], ranks: list[dict[str, list[float]]], event_s: float) -> None:
    kinds = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        count, seconds = (sum(rank.get(name, (0, 0))[place] for rank in ranks) / len(ranks) for place in (0, 1))
        kinds[name] = {"events_per_step": count, "event_s": seconds / count, "step_s": seconds}
    events = max(sum(count for count, _ in rank.values()) for rank in ranks)
    found["kinds"] = kinds
    found["trace"] = {
        "events_per_step": events,
        "event_s": event_s,
        "action_s": events * event_s / found["actions_per_rank"],
        "share_of_step": events * event_s / found["step_s"],
    }


def show_engine(found: dict[str, Any]) -> None:
    show_about(found)
    size = f"p = {found['p']}, v = {found['v']}, m = {found['m']}"
    actions = f"{found['actions_per_rank']} actions (F, B, I, W) a rank"
    print(f"{found['schedule']}: {size}, {actions}; one Linear({WIDTH}, {WIDTH}) a stage")
    low, high = (format_seconds(found[key]) for key in ("step_min_s", "step_max_s"))
    print(f"step: {format_seconds(found['step_s'])} ({low} to {high}, median of {found['steps']})")
    print(f"action: {found['action_s'] * 1e6:.1f} us")
    if found["trace"] is None:
        return
    rest = found["step_s"] - sum(kind["step_s"] for kind in found["kinds"].values())
    rows = [
        [name, f"{kind['events_per_step']:.1f}", f"{kind['event_s'] * 1e6:.1f}", f"{kind['step_s'] * 1e6:.0f}",
         f"{kind['step_s'] / found['step_s']:.1%}"]
        for name, kind in found["kinds"].items()
    ]  # fmt: skip
    print("\nmeans over the ranks:")
    rows.append(["(no event)", "", "", f"{max(rest, 0.0) * 1e6:.0f}", f"{max(rest, 0.0) / found['step_s']:.1%}"])
    print_table(["kind", "events a step", "us each", "us a step", "of the step"], rows)
    trace = found["trace"]
    print(
        f"\ntrace: {counted(round(trace['events_per_step']), 'event')} a step x {trace['event_s'] * 1e9:.0f} ns = "
        f"{trace['action_s'] * 1e6:.2f} us an action, {trace['share_of_step']:.2%} of the step"
    )
