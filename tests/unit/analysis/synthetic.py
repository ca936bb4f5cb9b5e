"""Trace files made from a simulator's own times, as a run of a known schedule would have left them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mpipipe.formats.paths import RunPaths
from mpipipe.formats.trace import FLAG_GRADIENT, EventKind, TraceWriter
from mpipipe.schedule import Costs, Kind, ScheduleTable, build, simulate
from mpipipe.trace import Recorder

MS = 1_000_000
STEP_NS = 200 * MS
EPOCH_NS = 1_000_000 * MS


@dataclass
class Clock:
    """A rank's clock against rank 0's: ahead by ``ahead_ns`` at EPOCH_NS, running ``ppm`` fast, set back at a true
    time.
    """

    ahead_ns: int = 0
    ppm: float = 0.0
    set_back_at_ns: int = 1 << 62
    set_back_by_ns: int = 0

    def local(self, true_ns: int) -> int:
        late = self.set_back_by_ns if true_ns >= self.set_back_at_ns else 0
        return true_ns + self.ahead_ns + round((true_ns - EPOCH_NS) * self.ppm * 1e-6) - late


@dataclass
class Made:
    """What make_run wrote."""

    run_dir: Path
    table: ScheduleTable
    segment: int
    clocks: dict[int, Clock] = field(default_factory=dict)


def make_run(
    run_dir: Path,
    *,
    schedule: str = "1f1b",
    p: int = 4,
    v: int = 1,
    m: int = 8,
    steps: int = 3,
    costs: Costs | None = None,
    clocks: Mapping[int, Clock] | None = None,
    uncalibrated: tuple[int, ...] = (),
    unfinished: Mapping[int, int] | None = None,
    config: str = "seed = 1\n",
    jitter: float = 0.0,
    shared_loss: bool = False,
) -> Made:
    """A segment of ``steps`` steps (0, 1, ...), step k starting at EPOCH_NS + k * STEP_NS; costs in ms, latency 0.

    ``unfinished``: rank -> last step it finished; its next step ends amid and the file stays a ``.part``. ``jitter``:
    each compute event ends early by up to this part of its length. ``shared_loss``: a LOSS event lasts from a rank's
    last action to the end of the pipeline.
    """
    run = RunPaths(run_dir)
    segment = run.next_segment()
    table = build(schedule, p=p, m=m, v=v)
    simulation = simulate(table, costs)
    clocks = dict(clocks or {})
    rng = np.random.default_rng(1)
    for rank in range(p):
        clock = clocks.get(rank, Clock())
        header = {"rank": rank, "world_size": p, "p": p, "v": v, "d": 1, "host": "synthetic", "config": config}
        writer = TraceWriter(run.trace_file(segment, rank), header)
        writer.add_schedule(0, table.rows(), table.placement, {"F": 1.0, "I": 1.0, "W": 1.0}, table.name)
        recorder = Recorder(writer)
        last = (unfinished or {}).get(rank)
        for step in range(steps if last is None else min(steps, last + 2)):
            start = EPOCH_NS + step * STEP_NS
            if rank not in uncalibrated:
                _sample(recorder, clock, start - MS)
            finished = last is None or step != last + 1
            record_step(recorder, table, simulation, rank, step, start, clock, rng, jitter, finished, shared_loss)
        if last is None:
            if rank not in uncalibrated:
                _sample(recorder, clock, EPOCH_NS + steps * STEP_NS)
            recorder.close()
        else:
            recorder.flush()
    return Made(run_dir, table, segment, clocks)


def _sample(recorder: Recorder, clock: Clock, true_ns: int) -> None:
    local = clock.local(true_ns)
    recorder.clock(local, true_ns - local, 4000)


def record_step(
    recorder, table, simulation, rank, step, start, clock, rng, jitter, finished, shared_loss=False
) -> None:
    """One rank's step; only the first half of its rows and no end if not ``finished``."""
    recorder.begin_step(step, 0)
    at = clock.local
    row = table.row_of(rank)
    count = row.stop - row.start if finished else (row.stop - row.start) // 2
    free, chunk_of = (
        0.0,
        {stage: chunk for chunk, stage in enumerate(np.flatnonzero(np.array(table.placement) == rank))},
    )
    for line in range(count):
        index = row.start + line
        action = table.action(index)
        begin, end = simulation.start[index], simulation.end[index]
        chunk = chunk_of[action.stage]
        common = {"row": line, "stage": action.stage, "chunk": chunk, "microbatch": action.microbatch}
        gradient = action.kind != Kind.F
        peer = _neighbour(table, action.stage, 1 if gradient else -1, rank)
        flags = FLAG_GRADIENT if gradient else 0
        if peer is not None and begin > free:
            t0, t1 = at(start + round(free * MS)), at(start + round(begin * MS))
            recorder.record(EventKind.RECV_WAIT, t0, t1, **common, peer=peer, nbytes=4096, flags=flags)
        early = jitter * rng.random() * (end - begin)
        done = start + round((end - early) * MS)
        recorder.record(int(action.kind), at(start + round(begin * MS)), at(done), **common)
        to = _neighbour(table, action.stage, -1 if gradient else 1, rank)
        if to is not None:
            recorder.record(EventKind.SEND_POST, at(done), at(done), **common, peer=to, nbytes=4096, flags=flags)
        free = end
    if finished:
        after = start + round(simulation.makespan * MS)
        if shared_loss:
            recorder.record(EventKind.LOSS, at(start + round(free * MS)), at(after))
        recorder.record(EventKind.OPTIMIZER, at(after), at(after + 2 * MS))
        recorder.end_step(at(start), at(after + 3 * MS), 1024, 2.5 - step / 10 if rank == table.p - 1 else None)


def _neighbour(table: ScheduleTable, stage: int, by: int, rank: int) -> int | None:
    """The rank of the stage beside, None at the pipeline's end or on the same rank."""
    other = stage + by
    if not 0 <= other < table.num_stages or table.placement[other] == rank:
        return None
    return table.placement[other]
