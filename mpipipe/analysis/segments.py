"""The segments of a run folder: which are there, and what to say when the one asked for is not."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mpipipe.errors import ConfigError
from mpipipe.formats.paths import RunPaths, trace_files

_MOST_PARTS = 12


def segments_in(run_dir: Path) -> dict[int, int]:
    """Number of ranks that left a trace file, by segment number, ascending; segments without a file are left out."""
    run = RunPaths(run_dir)
    counts = {number: len({rank for rank, _ in trace_files(run.trace_segment(number))}) for number in run.segments()}
    return {number: count for number, count in counts.items() if count}


def is_segment(run_dir: Path) -> bool:
    """Whether the folder itself holds trace files. Raises ConfigError if there is no such folder."""
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such folder; give a run's folder or a segment's", key="RUN_DIR")
    return bool(trace_files(run_dir))


def check_asked(run_dir: Path, segment: int | None, found: dict[int, int]) -> None:
    """Raise ConfigError if the run folder has no trace, or not the segment asked for."""
    if segment is not None and not found and is_segment(run_dir):
        problem = f"{run_dir} is one segment's own folder"
        raise ConfigError(problem, key="--segment", value=segment, allowed="RUN_DIR without --segment")
    if not found:
        raise ConfigError(
            f"no trace in {run_dir}: looked for trace/segment-NNNN/rank-NNNNN.h5 and .h5.part there, and for such rank "
            "files in the folder itself; was trace.enabled = false?",
            key="RUN_DIR",
            value=str(run_dir),
        )
    if segment is not None and segment not in found:
        problem = f"{run_dir} has no trace segment {segment}"
        raise ConfigError(problem, key="--segment", value=segment, allowed=ranges(found))


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers in words, runs of three and more as ``1 to 450``; ``none`` for none."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts: list[str] = []
    for first, last in runs:
        parts += [f"{first} to {last}"] if last - first > 1 else [str(each) for each in range(first, last + 1)]
    more = len(parts) - _MOST_PARTS
    return (", ".join(parts[:_MOST_PARTS]) + (f" and {more} more" if more > 0 else "")) or "none"


def ranks_text(present: int, world_size: int) -> str:
    """``4 ranks``, ``1 rank``, ``3 of 4 ranks``."""
    of = "" if present == world_size else f"{present} of "
    return f"{of}{world_size} rank{'' if world_size == 1 else 's'}"


def place_text(number: int | None, numbers: Iterable[int]) -> str:
    """``segment 1 of 2``; ``segment 5 (of 3, 5)`` where numbers are missing; empty for a segment without a number."""
    known = sorted(numbers)
    if number is None:
        return ""
    if not known:
        return f"segment {number}"
    if known == list(range(1, len(known) + 1)):
        return f"segment {number} of {len(known)}"
    return f"segment {number} (of {ranges(known)})"


def segment_text(number: int | None, numbers: Iterable[int], present: int, world_size: int) -> str:
    """``segment 1 of 2 (4 ranks); --segment N for another``."""
    known = tuple(numbers)
    place = place_text(number, known)
    ranks = ranks_text(present, world_size)
    return (f"{place} ({ranks})" if place else ranks) + ("; --segment N for another" if len(known) > 1 else "")
