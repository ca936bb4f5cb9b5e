"""Closed forms for the families, each checked against ``simulate`` in tests/unit/schedule/test_formulas.py and
test_formulas_grid.py.

Letters: p = num_ranks, v = chunks_per_rank, m = num_microbatches, r a rank, f, i and w the times of one chunk's
forward, input gradient and weight gradient, b = i + w its whole backward, c the latency of one hop. Times are in the
unit of f and b. Every stage costs the same unless a function takes one number per stage. ``schedule``: a name as
``build`` takes it, with its options. A function returns None where its closed form does not hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpipipe.schedule.families.eager import eager_warmups
from mpipipe.schedule.families.interleaved import group_sizes, interleaved_warmups
from mpipipe.schedule.families.one_f_one_b import one_f_one_b_warmups
from mpipipe.schedule.families.zero_bubble import weight_lags
from mpipipe.schedule.registry import build, family_of
from mpipipe.schedule.simulate import simulate


def makespan_naive(p: int, v: int, m: int, f: float, b: float) -> float:
    """Any p, v, m: m p v (f+b)."""
    return m * p * v * (f + b)


def makespan_forward_only(p: int, v: int, m: int, f: float) -> float:
    """Loop placement. m >= p: (m v + p - 1) f; m < p: (m + p v - 1) f."""
    return _slots(p, v, m) * f


def makespan(p: int, v: int, m: int, f: float, b: float) -> float:
    """gpipe, looped-bfs, 1f1b and eager-1f1b (v=1), interleaved, with any option. m >= p: (m v + p - 1)(f+b); m < p:
    (m + p v - 1)(f+b). One formula for v=1: (m+p-1)(f+b)."""
    return _slots(p, v, m) * (f + b)


def makespan_gpipe_latency(p: int, m: int, f: float, b: float, c: float) -> float:
    """v=1, any m: (m+p-1)(f+b) + 2c(p-1)."""
    return makespan(p, 1, m, f, b) + 2 * c * (p - 1)


def makespan_1f1b_latency(p: int, m: int, f: float, b: float, c: float) -> float:
    """v=1, any m: (m+p-1)(f+b) + 2c(p-1) + 2c floor((m-1)(p-1)/p): a hop is waited for in the steady state too."""
    return makespan_eager_latency(p, m, f, b, c, per_hop=1)


def makespan_eager_latency(p: int, m: int, f: float, b: float, c: float, per_hop: int = 2) -> float:
    """eager-1f1b with k = per_hop, any m: (m+p-1)(f+b) + 2c(p-1) + max(0, 2c - (k-1)(f+b)) floor((m-1)(p-1) /
    (k(p-1)+1)): up to 2c = (k-1)(f+b) the steady state does not wait for a hop."""
    waits = (m - 1) * (p - 1) // (per_hop * (p - 1) + 1)
    return makespan_gpipe_latency(p, m, f, b, c) + max(0, 2 * c - (per_hop - 1) * (f + b)) * waits


def makespan_gpipe_uneven(m: int, f: Sequence[float], b: Sequence[float]) -> float:
    """v=1, f and b per stage, any m: sum f + (m-1) max f + sum b + (m-1) max b."""
    return sum(f) + (m - 1) * max(f) + sum(b) + (m - 1) * max(b)


def makespan_zb_h1(p: int, m: int, f: float, i: float, w: float) -> float:
    """Any m and costs: m(f+i+w) + (p-1)(f+i) - (min(m, p) - 1) min(f, i, w).

    The paper's bubble, makespan less work, is (p-1)(f+i-w): it holds for w <= f, w <= i and m >= p.
    """
    return m * (f + i + w) + (p - 1) * (f + i) - (min(m, p) - 1) * min(f, i, w)


def makespan_zb_h2(p: int, m: int, f: float, i: float, w: float) -> float | None:
    """m >= 2p-1, any costs: m(f+i+w) + (p-1) max(f, f+i-2 min(f, w)); for f=i=w m(f+i+w) + (p-1) f. None below."""
    return m * (f + i + w) + (p - 1) * max(f, f + i - 2 * min(f, w)) if m >= 2 * p - 1 else None


def span_bubble_zb_h2(p: int, m: int, f: float, i: float, w: float) -> float | None:
    """The largest wait between a rank's first start and last end, m >= 2p-1, any costs: (p-1) max(0, f+i-2 min(f, w)),
    0 for f=i=w. None below. The paper's (p-1)(f+i-2w) holds for w <= f and 2w <= f+i."""
    return (p - 1) * max(0, f + i - 2 * min(f, w)) if m >= 2 * p - 1 else None


def makespan_interleaved_zb(p: int, v: int, m: int, f: float, i: float, w: float) -> float | None:
    """m >= p, any costs and group: m v (f+i+w) + (p-1)(f+i-min(f, i, w)). v=1: as zb-h1, any m. None for v > 1 and m <
    p."""
    if v == 1:
        return makespan_zb_h1(p, m, f, i, w)
    return m * v * (f + i + w) + (p - 1) * (f + i - min(f, i, w)) if m >= p else None


def bubble_fraction(schedule: str, p: int, v: int, m: int) -> float:
    """Idle time of all ranks over p times the makespan, with equal stages, no latency, and where W is apart f=i=w.

    naive: 1 - 1/p. gpipe, looped-bfs, 1f1b, eager-1f1b and interleaved, m >= p: (p-1)/(m v + p - 1); m < p: (p v - v m
    + m - 1)/(m + p v - 1); v=1: (p-1)/(m+p-1) for any m. zb-h1, zb-h2 and interleaved-zb: from their makespan. Where
    there is no closed form the table is built and simulated.
    """
    family, options = family_of(schedule)
    if family.name == "naive":
        return (p - 1) / p
    if family.name in ("gpipe", "looped-bfs", "1f1b", "eager-1f1b", "interleaved"):
        slots = _slots(p, v, m)
        return (slots - m * v) / slots
    whole = None
    if family.name == "zb-h1" and not options.get("warmup"):
        whole = makespan_zb_h1(p, m, 1, 1, 1)
    elif family.name == "zb-h2":
        whole = makespan_zb_h2(p, m, 1, 1, 1)
    elif family.name == "interleaved-zb":
        whole = makespan_interleaved_zb(p, v, m, 1, 1, 1)
    return simulate(build(schedule, p=p, v=v, m=m)).bubble_fraction if whole is None else (whole - 3 * m * v) / whole


def bubble_ratio(p: int, v: int, m: int) -> float:
    """Idle time over work, m >= p or v=1: (p-1)/(m v)."""
    return (_slots(p, v, m) - m * v) / (m * v)


def peak_activations(schedule: str, p: int, v: int, m: int) -> tuple[int, ...]:
    """Most chunk activations alive at once on each rank, from F until B or W.

    naive v; gpipe and looped-bfs m v; 1f1b min(m, p-r); eager-1f1b min(m, 2(p-1-r)+1); interleaved, v > 1: min(m v,
    (v-1) g + 2(p-1-r) + 1), g the largest group of microbatches; zb-h1 min(m, p); zb-h2 min(m, 2p-1); interleaved-zb
    min(m v, (v-1) g + p). With options, and in general: min(m v, warm-up + 1 + places that W is behind). Other
    families: the table is built and counted.
    """
    places = _warmups_and_lags(schedule, p, v, m)
    if places is None:
        return tuple(simulate(build(schedule, p=p, v=v, m=m)).peak_activations.tolist())
    return tuple(min(m * v, warmup + 1 + lag) for warmup, lag in zip(*places, strict=True))


def peak_until_input_gradient(schedule: str, p: int, v: int, m: int) -> tuple[int, ...]:
    """As ``peak_activations``, from F until B or I: zb-h1 min(m, p-r), zb-h2 min(m, 2(p-r)-1), interleaved-zb min(m v,
    (v-1) g + p - r); the others as there."""
    places = _warmups_and_lags(schedule, p, v, m)
    if places is None:
        return tuple(simulate(build(schedule, p=p, v=v, m=m)).peak_until_input_gradient.tolist())
    return tuple(min(m * v, warmup + 1) for warmup in places[0])


def messages(p: int, v: int, m: int) -> int:
    """Messages between ranks in one step, both directions, loop placement, p > 1: 2 m (p v - 1). None with one rank."""
    return 2 * m * (p * v - 1) if p > 1 else 0


def _warmups_and_lags(schedule: str, p: int, v: int, m: int) -> tuple[list[int], list[int]] | None:
    """For each rank the forwards before its first pair of F and backward, and how many places its W are behind; None
    for a family that has no such turn."""
    family, options = family_of(schedule)
    none = [0] * p
    match family.name:
        case "naive":
            return [v - 1] * p, none
        case "gpipe" | "looped-bfs":
            return [m * v] * p, none
        case "1f1b":
            return one_f_one_b_warmups(p, options.get("warmup", 0)), none
        case "eager-1f1b":
            return eager_warmups(p, options.get("per_hop", 2)), none
        case "interleaved":
            return interleaved_warmups(p, v, m, options.get("group")), none
        case "zb-h1":
            return one_f_one_b_warmups(p, options.get("warmup", 0)), weight_lags(p, options.get("warmup", 0))
        case "zb-h2":
            return one_f_one_b_warmups(p, p), weight_lags(p, p)
        case "interleaved-zb":
            lead = (v - 1) * group_sizes(p, m, options.get("group"))[0]
            return [lead + behind for behind in one_f_one_b_warmups(p)], weight_lags(p)
    return None


def _slots(p: int, v: int, m: int) -> int:
    """Makespan in units of f+b."""
    return m * v + p - 1 if m >= p else m + p * v - 1
