"""Zero-bubble schedules on a loop placement: W, which no other rank waits for, is put off to fill the waiting.

Letters: p ranks, v chunks per rank, m microbatches, r a rank; f, i and w the times of one chunk's F, I and W. The
papers write B for I. The closed forms are in ``formulas``.
"""

from __future__ import annotations

from mpipipe.schedule.families.in_turn import in_turn, one_chunk
from mpipipe.schedule.families.interleaved import GROUP, forward_order, group_sizes
from mpipipe.schedule.families.one_f_one_b import one_f_one_b_warmups
from mpipipe.schedule.family import Family, Option
from mpipipe.schedule.table import ScheduleTable


def zb_h1(p: int, m: int, warmup: int = 0) -> ScheduleTable:
    """1F1B with split backward at 1F1B's memory: after p-1-r forwards F and I in turn, the W of a backward r places
    behind its I, the last r W at the end.

    Makespan m(f+i+w) + (p-1)(f+i) - (min(m, p) - 1) min(f, i, w) for any m and costs; the paper's bubble
    (p-1)(f+i-w) holds for w <= f, w <= i, m >= p. Every rank keeps min(m, p) activations until their W, rank r
    min(m, p-r) of them until their I. ``warmup``: on each rank so many forwards more, at most p-1-r, and so many
    places more that W stays behind, at most r: 0 is ZB-H1, p-1 ``zb-h2``. For f=i=w and m >= 2p-1 the largest wait
    between a rank's first and last action is (p-1-warmup) f. Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023,
    section 2.1 (ZB-H1). p=3, m=4::

        rank 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    return in_turn("zb-h1", p, 1, m, one_chunk(m), one_f_one_b_warmups(p, warmup), weight_lags(p, warmup))


def zb_h2(p: int, m: int) -> ScheduleTable:
    """Split backward with twice the warm-up: 2(p-1-r) forwards, then F and I in turn, the W of a backward 2r places
    behind its I, the last 2r W at the end.

    For m >= 2p-1 and any costs the largest wait between a rank's first and last action is (p-1) max(0, f+i-2 min(f,
    w)), none for f=i=w, and the makespan m(f+i+w) + (p-1) max(f, f+i-2 min(f, w)): rank r starts r f late. Every rank
    keeps min(m, 2p-1) activations until their W, rank r min(m, 2(p-r)-1) of them until their I. Any m is allowed.
    Anything that all ranks wait for, as the gradient norm for clipping, brings the skew of (p-1) f back each step.
    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2.2 (ZB-H2). p=3, m=5::

        rank 0 | F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .  .
        rank 1 | .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 .
        rank 2 | .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """
    return in_turn("zb-h2", p, 1, m, one_chunk(m), one_f_one_b_warmups(p, p), weight_lags(p, p))


def interleaved_zb(p: int, v: int, m: int, group: int | None = None) -> ScheduleTable:
    """``zb-h1`` over v chunks per rank: min(m v, (v-1) g + p-1-r) forwards, then F and I in turn, the W of a backward r
    places behind its I, the last r W at the end. Stage s is on rank s % p.

    Groups of microbatches and the order of chunks as in ``interleaved``, g the largest group. m >= p: makespan
    m v (f+i+w) + (p-1)(f+i-min(f, i, w)); m < p: no closed form for v > 1. Every rank keeps min(m v, (v-1) g + p)
    activations until their W. Where torch's ScheduleInterleavedZeroBubble allows an m the order is the same. With v=1
    it is ``zb-h1``. Source: the rule of ZB-H1 (Qi et al., 2023) on the placement of interleaved 1F1B. p=2, v=2, m=2::

        rank 0 | 0F0 0F1 2F0 2F1 .   2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
        rank 1 | .   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """
    order = forward_order("interleaved-zb", p, v, m, group)
    lead = (v - 1) * group_sizes(p, m, group)[0]
    warmups = [lead + behind for behind in one_f_one_b_warmups(p)]
    return in_turn("interleaved-zb", p, v, m, order, warmups, weight_lags(p))


def weight_lags(p: int, more: int = 0) -> list[int]:
    """How many places each rank's W stay behind their I: r, and ``more`` where that is at most r."""
    return [rank + min(more, rank) for rank in range(p)]


_WARMUP = Option(
    description="forwards more before the first backward, on rank r at most p-1-r more",
    default="0; from p-1 on the schedule is zb-h2",
)
_CHUNKS = "'interleaved-zb' (the same with several chunks per rank)"

ZB_H1 = Family(
    name="zb-h1",
    summary="1f1b with split backward: about a third of its waiting, with p activations on every rank",
    generate=lambda p, v, m, warmup=0: zb_h1(p, m, warmup),
    chunks=1,
    other_chunks=_CHUNKS,
    options={"warmup": _WARMUP},
)
ZB_H2 = Family(
    name="zb-h2",
    summary="split backward with no waiting between a rank's first and last action, with 2p-1 activations",
    generate=lambda p, v, m: zb_h2(p, m),
    chunks=1,
    other_chunks=_CHUNKS,
)
INTERLEAVED_ZB = Family(
    name="interleaved-zb",
    summary="interleaved with split backward: zb-h1 over several chunks per rank",
    generate=interleaved_zb,
    options={"group": GROUP},
)
