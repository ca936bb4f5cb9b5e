"""The families of schedules by name. Letters: p = num_ranks, v = chunks_per_rank, m = num_microbatches."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from mpipipe.errors import ScheduleError
from mpipipe.schedule.gpipe import gpipe
from mpipipe.schedule.interleaved import interleaved
from mpipipe.schedule.naive import naive
from mpipipe.schedule.one_f_one_b import one_f_one_b
from mpipipe.schedule.table import MAX_STAGES, ScheduleTable


def _one_f_one_b(p: int, v: int, m: int) -> ScheduleTable:
    if v != 1:
        raise ScheduleError(
            f"pipeline.schedule = '1f1b' has one chunk per rank, pipeline.chunks = {v} was asked for: "
            "take pipeline.schedule = 'interleaved' (1F1B with several chunks per rank) or pipeline.chunks = 1"
        )
    return one_f_one_b(p, m)


FAMILIES: Mapping[str, Callable[[int, int, int], ScheduleTable]] = MappingProxyType(
    {"naive": naive, "gpipe": gpipe, "1f1b": _one_f_one_b, "interleaved": interleaved}
)
"""Name of each family -> its generator (p, v, m)."""


def names() -> tuple[str, ...]:
    """The names that ``build`` knows."""
    return tuple(FAMILIES)


def build(name: str, *, p: int, m: int, v: int = 1) -> ScheduleTable:
    """The table of a family for p ranks, v chunks per rank and m microbatches, each 1 or more (m < p too).

    Raises ScheduleError, in configuration keys, for an unknown name, a number that does not fit, and v > 1 with
    ``1f1b``.
    """
    if name not in FAMILIES:
        near = difflib.get_close_matches(str(name).lower(), FAMILIES, n=1, cutoff=0.4)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ScheduleError(f"pipeline.schedule = '{name}' is unknown{hint} (allowed: {', '.join(FAMILIES)})")
    numbers = (("pipeline.ranks", p), ("pipeline.chunks", v), ("m, from batch.sequences and batch.microbatch,", m))
    for key, number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ScheduleError(f"{key} = {number!r} must be a whole number, 1 or more")
    if p * v > MAX_STAGES:
        raise ScheduleError(
            f"pipeline.ranks = {p} times pipeline.chunks = {v} gives {p * v} stages, a table holds at most {MAX_STAGES}"
        )
    return FAMILIES[name](p, v, m)
