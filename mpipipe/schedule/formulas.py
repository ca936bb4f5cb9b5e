"""Closed forms for the families, each checked against ``simulate`` in tests/unit/schedule/test_formulas.py.

Letters: p = num_ranks, v = chunks_per_rank, m = num_microbatches, r a rank, f and b the time of one chunk's forward
and whole backward, c the latency of one hop. Times are in the unit of f and b. Every stage costs the same unless a
function takes one number per stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpipipe.errors import ScheduleError
from mpipipe.schedule.families.interleaved import group_sizes, warmup_forwards
from mpipipe.schedule.registry import names


def makespan_naive(p: int, v: int, m: int, f: float, b: float) -> float:
    """Any p, v, m: m p v (f+b)."""
    return m * p * v * (f + b)


def makespan_forward_only(p: int, v: int, m: int, f: float) -> float:
    """Loop placement. m >= p: (m v + p - 1) f; m < p: (m + p v - 1) f."""
    return _slots(p, v, m) * f


def makespan(p: int, v: int, m: int, f: float, b: float) -> float:
    """gpipe, 1f1b (v=1) and interleaved. m >= p: (m v + p - 1)(f+b); m < p: (m + p v - 1)(f+b). One formula for v=1:
    (m+p-1)(f+b)."""
    return _slots(p, v, m) * (f + b)


def makespan_gpipe_latency(p: int, m: int, f: float, b: float, c: float) -> float:
    """v=1, any m: (m+p-1)(f+b) + 2c(p-1)."""
    return makespan(p, 1, m, f, b) + 2 * c * (p - 1)


def makespan_1f1b_latency(p: int, m: int, f: float, b: float, c: float) -> float:
    """v=1, any m: (m+p-1)(f+b) + 2c(p-1) + 2c floor((m-1)(p-1)/p): a hop is waited for in the steady state too."""
    return makespan_gpipe_latency(p, m, f, b, c) + 2 * c * ((m - 1) * (p - 1) // p)


def makespan_gpipe_uneven(m: int, f: Sequence[float], b: Sequence[float]) -> float:
    """v=1, f and b per stage, any m: sum f + (m-1) max f + sum b + (m-1) max b."""
    return sum(f) + (m - 1) * max(f) + sum(b) + (m - 1) * max(b)


def bubble_fraction(schedule: str, p: int, v: int, m: int) -> float:
    """Idle time of all ranks over p times the makespan, with equal stages and no latency.

    naive: 1 - 1/p. Others, m >= p: (p-1)/(m v + p - 1); m < p: (p v - v m + m - 1)/(m + p v - 1). v=1: (p-1)/(m+p-1)
    for any m.
    """
    _known(schedule)
    if schedule == "naive":
        return (p - 1) / p
    slots = _slots(p, v, m)
    return (slots - m * v) / slots


def bubble_ratio(p: int, v: int, m: int) -> float:
    """Idle time over work, m >= p or v=1: (p-1)/(m v)."""
    return (_slots(p, v, m) - m * v) / (m * v)


def peak_activations(schedule: str, p: int, v: int, m: int) -> tuple[int, ...]:
    """Most chunk activations alive at once on each rank, from F until B.

    naive v; gpipe m v; 1f1b min(m, p-r); interleaved, v > 1: min(m v, (v-1) g + 2(p-1-r) + 1), g the largest group of
    microbatches.
    """
    _known(schedule)
    if schedule == "naive":
        return (v,) * p
    if schedule == "gpipe":
        return (m * v,) * p
    group = group_sizes(p, m)[0]
    return tuple(min(m * v, warmup_forwards(p, v, m, group, rank) + 1) for rank in range(p))


def messages(p: int, v: int, m: int) -> int:
    """Messages between ranks in one step, both directions, loop placement, p > 1: 2 m (p v - 1). None with one rank."""
    return 2 * m * (p * v - 1) if p > 1 else 0


def _known(schedule: str) -> None:
    if schedule not in names():
        raise ScheduleError(f"no formula for the schedule '{schedule}' (known: {', '.join(names())})")


def _slots(p: int, v: int, m: int) -> int:
    """Makespan in units of f+b."""
    return m * v + p - 1 if m >= p else m + p * v - 1
