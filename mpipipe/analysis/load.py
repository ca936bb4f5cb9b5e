"""One launch's trace, all ranks together on rank 0's clock.

p: pipeline ranks, v: chunks per rank, d: replicas.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mpipipe.analysis.causality import count_causality_violations
from mpipipe.analysis.clocks import correct
from mpipipe.analysis.segments import check_asked, is_segment, ranges, ranks_text, segment_text, segments_in
from mpipipe.errors import ConfigError, TraceFormatError
from mpipipe.formats.paths import RunPaths, trace_files
from mpipipe.formats.trace import COMPUTE_KINDS, LAST_COMPUTE_KIND, TraceFile, read_trace
from mpipipe.schedule import ScheduleTable


@dataclass(frozen=True)
class RankTrace:
    """One rank's events and steps on rank 0's clock, ordered by step (then as recorded)."""

    rank: int
    position: int
    trace: TraceFile
    events: npt.NDArray[np.void]
    steps: npt.NDArray[np.void]
    clock_error_ns: float

    def events_of(self, step: int) -> npt.NDArray[np.void]:
        """A view of the step's events."""
        first, last = np.searchsorted(self.events["step"], [step, step + 1])
        return self.events[first:last]

    def row_of(self, step: int) -> np.void | None:
        """The step's line of /steps, None if the rank did not finish it."""
        at = int(np.searchsorted(self.steps["step"], step, side="right")) - 1
        return self.steps[at] if at >= 0 and self.steps["step"][at] == step else None


@dataclass(frozen=True)
class Segment:
    """A launch as its traces tell it.

    ``ranks``: by rank, those that could be used. ``steps``: those that every one of them finished and kept whole;
    ``left_out``: the others, with the reason. ``tables``: by id. ``causality``: (receives that end before their send
    began by more than the clocks' error, receives that could be matched). ``warnings``: what is missing, doubled,
    foreign, lost or unsure. ``number``: of the launch, None if neither folder nor files tell it. ``segments``: number
    of ranks that left a file, by segment of the run folder; empty if a segment's own folder was read.
    """

    path: Path
    number: int | None
    segments: dict[int, int]
    world_size: int
    p: int
    v: int
    d: int
    ranks: dict[int, RankTrace]
    missing_ranks: tuple[int, ...]
    steps: tuple[int, ...]
    left_out: dict[int, str]
    tables: dict[int, ScheduleTable]
    causality: tuple[int, int]
    config: str
    warnings: list[str]

    def table_of(self, step: int) -> ScheduleTable | None:
        """The schedule table that the step ran, None if the trace does not hold it."""
        row = next(iter(self.ranks.values())).row_of(step)
        return None if row is None else self.tables.get(int(row["table"]))

    def require_step(self, step: int) -> None:
        """Raise ConfigError (key ``--step``) unless the step is whole on all ranks."""
        if step in self.steps:
            return
        why = f"is not whole on all ranks: {self.left_out[step]}" if step in self.left_out else "is not in it"
        allowed = ranges(self.steps) if self.steps else "none: no step of this segment is whole on all ranks"
        raise ConfigError(f"{self.path}: step {step} {why}", key="--step", value=step, allowed=allowed)

    def text(self) -> str:
        """``segment 1 of 2 (4 ranks); --segment N for another``."""
        return segment_text(self.number, self.segments, len(self.ranks), self.world_size)


def load_segment(run_dir: str | Path, segment: int | None = None, *, allow_uncalibrated: bool = False) -> Segment:
    """Read a launch's traces: number ``segment`` of a run folder, or a segment's own folder; by default the last
    segment of the run folder that holds a step whole on all ranks (``warnings`` name those passed over).

    Raises ConfigError when the folder has no trace or not that segment; TraceFormatError when none can be read, when no
    segment of the run holds a whole step and none was asked for, or when a rank other than 0 has no clock samples and
    ``allow_uncalibrated`` is false (with it its clock counts as equal to rank 0's: right only on one host).
    """
    run = Path(run_dir)
    if segment is None and is_segment(run):
        loaded = _load(run, None, {})
    else:
        found = segments_in(run)
        check_asked(run, segment, found)
        loaded = (
            _last_with_a_step(run, found)
            if segment is None
            else _load(RunPaths(run).trace_segment(segment), segment, found)
        )
    _check_calibrated(loaded, allow_uncalibrated)
    return loaded


def _last_with_a_step(run: Path, found: dict[int, int]) -> Segment:
    passed: list[str] = []
    for number in sorted(found, reverse=True):
        name = f"segment {number} ({ranks_text(found[number], found[number])})"
        try:
            loaded = _load(RunPaths(run).trace_segment(number), number, found)
        except TraceFormatError as error:
            passed.append(f"{name}: {error}")
            continue
        if loaded.steps:
            loaded.warnings.extend(f"passed over, having no step whole on all ranks: {text}" for text in passed)
            return loaded
        reasons = "; ".join(f"step {step} {why}" for step, why in list(loaded.left_out.items())[:3])
        passed.append(f"{name}: no whole step of {len(loaded.left_out)} begun" + (f" ({reasons})" if reasons else ""))
    raise TraceFormatError(f"{run}: no step is whole on all ranks in any segment; " + "; ".join(reversed(passed)))


def _check_calibrated(segment: Segment, allow_uncalibrated: bool) -> None:
    bare = [rank for rank, one in segment.ranks.items() if rank and not len(one.trace.clock)]
    if bare and not allow_uncalibrated:
        raise TraceFormatError(
            f"{segment.ranks[bare[0]].trace.path}: group /clock: no samples, so the clocks of ranks {_listed(bare)} "
            "can't be compared with rank 0's; pass allow_uncalibrated=True (--allow-uncalibrated) if all ran on one "
            "host"
        )
    if bare:
        segment.warnings.append(f"ranks {_listed(bare)}: clock not compared with rank 0's, taken as equal")


def _load(folder: Path, number: int | None, segments: dict[int, int]) -> Segment:
    warnings: list[str] = []
    traces = _one_run(_readable(folder, warnings), warnings)
    if not traces:
        raise TraceFormatError(f"{folder}: no readable trace file; " + "; ".join(warnings))
    first = next(iter(traces.values()))
    world_size, p = int(first.attributes["world_size"]), int(first.attributes["p"])
    ranks = {rank: _corrected(trace, p, warnings) for rank, trace in traces.items()}
    missing = tuple(rank for rank in range(world_size) if rank not in ranks)
    if missing:
        warnings.append(f"ranks {_listed(missing)} of {world_size} are missing: figures are of the others")
    tables = _tables(traces)
    steps, left_out = _whole_steps(ranks, tables)
    if left_out:
        warnings.append(f"steps {ranges(left_out)} are not complete on all ranks and are left out")
    causality = count_causality_violations(ranks, steps, tables, p)
    if causality[0]:
        warnings.append(f"{causality[0]} of {causality[1]} receives end before their send began: clocks are unsure")
    if number is None and "segment" in first.attributes:
        number = int(first.attributes["segment"])
    return Segment(
        path=folder,
        number=number,
        segments=segments,
        world_size=world_size,
        p=p,
        v=int(first.attributes["v"]),
        d=int(first.attributes["d"]),
        ranks=ranks,
        missing_ranks=missing,
        steps=steps,
        left_out=left_out,
        tables=tables,
        causality=causality,
        config=first.config,
        warnings=warnings,
    )


def _readable(folder: Path, warnings: list[str]) -> dict[int, TraceFile]:
    """By rank, the files that can be read; a rank's finished file goes before its ``.part``."""
    traces: dict[int, TraceFile] = {}
    for rank, path in trace_files(folder):
        try:
            trace = read_trace(path)
        except TraceFormatError as error:
            warnings.append(f"left out: {error}")
            continue
        if trace.rank != rank:
            warnings.append(f"left out: {path}: the file says rank {trace.rank}, its name rank {rank}")
        elif rank in traces:
            warnings.append(f"left out: {path}: rank {rank} is already there in {traces[rank].path.name}")
        else:
            traces[rank] = trace
            warnings.extend(trace.warnings)
    return traces


def _one_run(traces: dict[int, TraceFile], warnings: list[str]) -> dict[int, TraceFile]:
    """Without the files of another run than most are of (on a tie: than the lowest rank's)."""

    def run_of(trace: TraceFile) -> tuple[object, ...]:
        a = trace.attributes
        return (a.get("run_id") or trace.config, a.get("segment"), a["world_size"], a["p"], a["v"], a["d"])

    counts = Counter(run_of(trace) for trace in traces.values())
    if len(counts) < 2:
        return traces
    chosen = counts.most_common(1)[0][0]
    for trace in traces.values():
        if run_of(trace) != chosen:
            warnings.append(f"left out: {trace.path}: of another run or launch than most files beside it")
    return {rank: trace for rank, trace in traces.items() if run_of(trace) == chosen}


def _corrected(trace: TraceFile, p: int, warnings: list[str]) -> RankTrace:
    times = correct(trace)
    warnings.extend(f"rank {trace.rank}: {remark}" for remark in times.remarks)
    events = times.events
    if np.any(np.diff(events["step"]) < 0):
        events = events[np.argsort(events["step"], kind="stable")]
    steps = times.steps[np.argsort(times.steps["step"], kind="stable")]
    backward = int(np.count_nonzero(events["t1_ns"] < events["t0_ns"]))
    if backward:
        warnings.append(f"rank {trace.rank}: {backward} events end before they begin")
    position = int(trace.attributes.get("pipeline_rank", trace.rank % p))
    return RankTrace(trace.rank, position, trace, events, steps, times.error_ns)


def _tables(traces: dict[int, TraceFile]) -> dict[int, ScheduleTable]:
    found: dict[int, ScheduleTable] = {}
    for trace in traces.values():
        for key, kept in trace.schedules.items():
            if key not in found:
                name = kept.name or f"table {key}"
                found[key] = ScheduleTable.from_rows(kept.rows, name=name, placement=kept.placement)
    return found


def expected_counts(table: ScheduleTable, position: int) -> dict[str, int]:
    """How many F, B, I, W the table has for a pipeline rank."""
    kinds = np.bincount(table.kinds[table.row_of(position)], minlength=len(COMPUTE_KINDS))
    return {kind.name: int(kinds[kind]) for kind in COMPUTE_KINDS}


def _whole_steps(
    ranks: dict[int, RankTrace], tables: dict[int, ScheduleTable]
) -> tuple[tuple[int, ...], dict[int, str]]:
    numbers = [column["step"] for one in ranks.values() for column in (one.steps, one.events)]
    everywhere = np.unique(np.concatenate(numbers)).tolist()
    rows = {rank: {int(row["step"]): row for row in one.steps} for rank, one in ranks.items()}
    whole, left_out = [], {}
    for step in everywhere:
        if step < 0:
            continue
        lacking = [rank for rank in ranks if step not in rows[rank]]
        if lacking:
            left_out[step] = f"not finished on ranks {_listed(lacking)}"
            continue
        partly = []
        for rank, one in ranks.items():
            table = tables.get(int(rows[rank][step]["table"]))
            found = int(np.count_nonzero(one.events_of(step)["kind"] <= LAST_COMPUTE_KIND))
            expected = found if table is None else sum(expected_counts(table, one.position).values())
            if found != expected or not found:
                partly.append(f"rank {rank} has {found} of {expected} compute events")
        if partly:
            left_out[step] = "; ".join(partly)
        else:
            whole.append(step)
    return tuple(whole), left_out


def _listed(numbers: tuple[int, ...] | list[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:12])
    return shown + (f" and {len(numbers) - 12} more" if len(numbers) > 12 else "")
