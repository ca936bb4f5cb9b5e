"""The figures of a launch: bubble measured and simulated, where each rank's time went, what each stage costs.

p: pipeline ranks. ``makespan``: first start to last end, over the ranks, of the pipeline's events (F, B, I, W,
RECV_WAIT, SEND_POST, SEND_WAIT). ``bubble_fraction`` = 1 - sum(busy) / (ranks * makespan); busy are F, B, I, W.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpipipe.analysis.load import Segment, expected_counts, load_segment
from mpipipe.formats.trace import (
    COMPUTE_KINDS,
    FLAG_GRADIENT,
    FLAG_LOCAL,
    LAST_COMPUTE_KIND,
    LAST_PIPELINE_KIND,
    EventKind,
)
from mpipipe.schedule import Costs, ScheduleTable, simulate

_TIMES = {
    "send_post_s": (EventKind.SEND_POST,),
    "send_wait_s": (EventKind.SEND_WAIT,),
    "optimizer_s": (EventKind.OPTIMIZER,),
    "clip_s": (EventKind.CLIP,),
    "data_s": (EventKind.LOAD_DATA,),
    "loss_s": (EventKind.LOSS,),
    "reduce_s": (EventKind.TIED_REDUCE, EventKind.REPLICA_REDUCE),
    "copy_s": (EventKind.COPY_TO_HOST, EventKind.COPY_TO_DEVICE),
    "checkpoint_s": (EventKind.CHECKPOINT,),
    "evaluate_s": (EventKind.EVALUATE,),
}
_PER_STEP = (
    "makespan_s",
    "step_s",
    "bubble_fraction",
    "bubble_fraction_simulated",
    "bubble_fraction_simulated_uniform",
)


def summary(
    run: str | Path | Segment, segment: int | None = None, *, allow_uncalibrated: bool = False
) -> dict[str, Any]:
    """Figures of a launch as a dict that JSON can hold (no NaN; times in seconds, sizes in bytes).

    ``segment``: number of the launch; ``segments``: those of the run folder, with the number of ranks that left a file.
    Averages leave out the segment's first step (warm-up) when there are others. ``bubble_fraction_simulated`` is that
    of the step's own table with the mean measured cost of each (stage, kind); ``..._uniform`` with F = I = W = 1; both
    without latency. With no whole step the lists are empty and the means null. Errors as :func:`load_segment`.
    """
    loaded = run if isinstance(run, Segment) else load_segment(run, segment, allow_uncalibrated=allow_uncalibrated)
    warmup, averaged = averaged_steps(loaded)
    costs = measured_costs(loaded, averaged)
    simulated = {key: _simulated(table, costs) for key, table in loaded.tables.items()} if averaged else {}
    per_step = [_step_figures(loaded, step, simulated) for step in loaded.steps]
    means = [each for each in per_step if each["step"] in averaged]
    return {
        "segment": loaded.number,
        "segments": [{"segment": number, "num_ranks": count} for number, count in loaded.segments.items()],
        "path": str(loaded.path),
        "p": loaded.p,
        "v": loaded.v,
        "d": loaded.d,
        "world_size": loaded.world_size,
        "schedules": {str(key): {"name": table.name, "m": table.m} for key, table in loaded.tables.items()},
        "ranks": sorted(loaded.ranks),
        "missing_ranks": list(loaded.missing_ranks),
        "steps": list(loaded.steps),
        "steps_left_out": [{"step": step, "reason": reason} for step, reason in sorted(loaded.left_out.items())],
        "warmup_step": warmup,
        "steps_averaged": len(averaged),
        "mean": {key: _mean([each[key] for each in means]) for key in _PER_STEP},
        "per_step": per_step,
        "per_rank": [_rank_figures(loaded, rank, averaged) for rank in sorted(loaded.ranks)],
        "per_stage": _stage_figures(loaded, averaged),
        "messages": _messages(loaded, averaged),
        "events": _event_counts(loaded),
        "clock": {
            "largest_error_s": max(one.clock_error_ns for one in loaded.ranks.values()) / 1e9,
            "receives_matched": loaded.causality[1],
            "receives_before_their_send": loaded.causality[0],
        },
        "warnings": list(loaded.warnings),
    }


def averaged_steps(segment: Segment) -> tuple[int | None, frozenset[int]]:
    """(the warm-up step left out of averages or None, the steps that averages are over)."""
    begun = [*segment.steps, *segment.left_out]
    steps = frozenset(segment.steps)
    if len(steps) > 1 and min(begun) in steps:
        return min(steps), steps - {min(steps)}
    return None, steps


def step_bounds(segment: Segment, step: int) -> tuple[int, int]:
    """First start and last end (ns, rank 0's clock) of the step's pipeline events over all ranks."""
    first, last = [], []
    for one in segment.ranks.values():
        events = one.events_of(step)
        events = events[events["kind"] <= LAST_PIPELINE_KIND]
        if len(events):
            first.append(int(events["t0_ns"].min()))
            last.append(int(events["t1_ns"].max()))
    return min(first), max(last)


def measured_bubble(segment: Segment, step: int) -> float:
    """1 - sum(busy) / (ranks * makespan) of one step, over the ranks that are there."""
    start, end = step_bounds(segment, step)
    whole = len(segment.ranks) * (end - start)
    busy = sum(_total(one.events_of(step), COMPUTE_KINDS) for one in segment.ranks.values())
    return (whole - busy) / whole if whole else 0.0


def measured_costs(segment: Segment, steps: frozenset[int]) -> Costs:
    """Mean measured duration, in ns, of each stage's F, I, W; a stage that only has B gives half of it to I and to W.

    A stage without events (its rank is missing) gets the mean of the others.
    """
    num_stages = segment.p * segment.v
    means = np.full((len(COMPUTE_KINDS), num_stages), np.nan)
    durations = _durations(segment, steps)
    for kind in COMPUTE_KINDS:
        for stage in range(num_stages):
            found = durations.get((stage, int(kind)))
            if found is not None:
                means[kind, stage] = found.mean()
    halves = means[EventKind.B] / 2
    rows = []
    for row in (
        means[EventKind.F],
        np.where(np.isnan(means[EventKind.I]), halves, means[EventKind.I]),
        np.where(np.isnan(means[EventKind.W]), halves, means[EventKind.W]),
    ):
        known = row[~np.isnan(row)]
        rows.append(np.where(np.isnan(row), known.mean() if known.size else 0.0, row).tolist())
    return Costs(F=rows[0], I=rows[1], W=rows[2])


def _durations(segment: Segment, steps: frozenset[int]) -> dict[tuple[int, int], npt.NDArray[np.int64]]:
    """Durations (ns) by (stage, kind) of the compute events of ``steps``."""
    parts = []
    wanted = np.fromiter(steps, np.int64, len(steps))
    for one in segment.ranks.values():
        chosen = (one.events["kind"] <= LAST_COMPUTE_KIND) & np.isin(one.events["step"], wanted)
        parts.append(one.events[chosen])
    events = np.concatenate(parts)
    key = events["stage"].astype(np.int64) * len(COMPUTE_KINDS) + events["kind"]
    length = events["t1_ns"] - events["t0_ns"]
    return {(int(k) // len(COMPUTE_KINDS), int(k) % len(COMPUTE_KINDS)): length[key == k] for k in np.unique(key)}


def _simulated(table: ScheduleTable, costs: Costs) -> tuple[float, float]:
    """Bubble fraction of the table with ``costs``, and with F = I = W = 1."""
    return simulate(table, costs).bubble_fraction, simulate(table).bubble_fraction


def _step_figures(segment: Segment, step: int, simulated: dict[int, tuple[float, float]]) -> dict[str, Any]:
    start, end = step_bounds(segment, step)
    rows = [row for row in (one.row_of(step) for one in segment.ranks.values()) if row is not None]
    table = int(rows[0]["table"])
    with_costs, uniform = simulated.get(table, (None, None))
    losses = [float(row["loss"]) for row in rows if not math.isnan(row["loss"])]
    return {
        "step": step,
        "table": table,
        "makespan_s": (end - start) / 1e9,
        "step_s": (max(int(row["t1_ns"]) for row in rows) - min(int(row["t0_ns"]) for row in rows)) / 1e9,
        "bubble_fraction": measured_bubble(segment, step),
        "bubble_fraction_simulated": with_costs,
        "bubble_fraction_simulated_uniform": uniform,
        "tokens": int(rows[0]["tokens"]),
        "loss": losses[0] if losses else None,
    }


def _rank_figures(segment: Segment, rank: int, steps: frozenset[int]) -> dict[str, Any]:
    """Mean seconds a step. Waits are those in which the rank computed nothing. ``other_s``: time of the step that no
    event covers.
    """
    one = segment.ranks[rank]
    sums: dict[str, float] = dict.fromkeys(("busy_s", "wait_activation_s", "wait_gradient_s", *_TIMES, "other_s"), 0.0)
    for step in steps:
        events = one.events_of(step)
        waits = events[events["kind"] == EventKind.RECV_WAIT]
        gradient = waits["flags"] & FLAG_GRADIENT != 0
        idle = _idle_lengths(waits, events[events["kind"] <= LAST_COMPUTE_KIND])
        sums["busy_s"] += _total(events, COMPUTE_KINDS)
        sums["wait_activation_s"] += int(idle[~gradient].sum())
        sums["wait_gradient_s"] += int(idle[gradient].sum())
        for key, kinds in _TIMES.items():
            sums[key] += _total(events, kinds)
        row = one.row_of(step)
        if row is not None:
            sums["other_s"] += _uncovered(events, int(row["t0_ns"]), int(row["t1_ns"]))
    count = max(len(steps), 1)
    return {"rank": rank, **{key: value / count / 1e9 for key, value in sums.items()}}


def _total(events: npt.NDArray[np.void], kinds: tuple[EventKind, ...]) -> int:
    chosen = np.isin(events["kind"], [int(kind) for kind in kinds])
    return int((events["t1_ns"][chosen] - events["t0_ns"][chosen]).sum())


def _idle_lengths(waits: npt.NDArray[np.void], compute: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """How long (ns) the rank computed nothing during each of ``waits``. On a GPU the host waits for the next message
    while the device still computes. Compute events of one rank do not overlap.
    """
    order = np.argsort(compute["t0_ns"], kind="stable")
    start, end = compute["t0_ns"][order], compute["t1_ns"][order]
    before = np.concatenate(([0], np.cumsum(end - start)))

    def computed_until(time_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        begun = np.searchsorted(start, time_ns, side="right")
        left = np.where(begun > 0, np.maximum(end[np.maximum(begun - 1, 0)] - time_ns, 0), 0) if len(end) else 0
        return np.asarray(before[begun] - left, dtype=np.int64)

    t0, t1 = waits["t0_ns"], waits["t1_ns"]
    return np.asarray(t1 - t0 - (computed_until(t1) - computed_until(t0)), dtype=np.int64)


def _uncovered(events: npt.NDArray[np.void], start: int, end: int) -> int:
    """Length of start..end that lies in no event; events may overlap."""
    order = np.argsort(events["t0_ns"], kind="stable")
    t0 = np.clip(events["t0_ns"][order], start, end)
    t1 = np.clip(events["t1_ns"][order], start, end)
    reached = np.maximum.accumulate(np.concatenate(([start], t1)))[:-1]
    return int(end - start - np.maximum(t1 - np.maximum(t0, reached), 0).sum())


def _stage_figures(segment: Segment, steps: frozenset[int]) -> list[dict[str, Any]]:
    durations = _durations(segment, steps)
    found = []
    for stage in sorted({stage for stage, _ in durations}):
        figures: dict[str, Any] = {"stage": stage}
        for kind in COMPUTE_KINDS:
            lengths = durations.get((stage, int(kind)))
            if lengths is not None:
                middle, high = np.percentile(lengths, [50, 95]) / 1e9
                figures[kind.name] = {
                    "count": len(lengths),
                    "mean_s": float(lengths.mean() / 1e9),
                    "p50_s": float(middle),
                    "p95_s": float(high),
                }
        found.append(figures)
    return found


def _messages(segment: Segment, steps: frozenset[int]) -> dict[str, Any]:
    """Messages a step (mean): as sent, and as the tables have them."""
    count = size = 0
    for one in segment.ranks.values():
        for step in steps:
            events = one.events_of(step)
            sent = events[(events["kind"] == EventKind.SEND_POST) & (events["flags"] & FLAG_LOCAL == 0)]
            count += len(sent)
            size += int(np.maximum(sent["nbytes"], 0).sum())
    tables = [table for table in (segment.table_of(step) for step in steps) if table is not None]
    expected = sum(_expected_messages(segment, table) for table in tables)
    per = max(len(steps), 1)
    return {"count_per_step": count / per, "bytes_per_step": size / per, "expected_per_step": expected / per}


def _expected_messages(segment: Segment, table: ScheduleTable) -> int:
    """Messages that the ranks of the segment send in a step of ``table``: no gradient to the stages before the first
    trained one."""
    place, last = table.placement, table.num_stages - 1
    total = 0
    for one in segment.ranks.values():
        row = table.row_of(one.position)
        first_trained = int(one.trace.attributes.get("first_trained_stage", 0))
        for stage, kind in zip(table.stages[row].tolist(), table.kinds[row].tolist(), strict=True):
            to, lowest = (stage + 1, 0) if kind == EventKind.F else (stage - 1, first_trained)
            total += kind != EventKind.W and lowest <= to <= last and place[to] != place[stage]
    return total


def _event_counts(segment: Segment) -> list[dict[str, Any]]:
    """By rank: F, B, I, W that the tables of its finished steps have, and those found in these steps."""
    counts = []
    for rank, one in sorted(segment.ranks.items()):
        expected = dict.fromkeys((kind.name for kind in COMPUTE_KINDS), 0)
        found = dict(expected)
        for row in one.steps:
            table = segment.tables.get(int(row["table"]))
            kinds = np.bincount(one.events_of(int(row["step"]))["kind"], minlength=len(EventKind))
            for kind in COMPUTE_KINDS:
                found[kind.name] += int(kinds[kind])
            for name, number in ({} if table is None else expected_counts(table, one.position)).items():
                expected[name] += number
        counts.append({"rank": rank, "expected": expected, "found": found})
    return counts


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
