"""Closed forms for the families on V, zig-zag and mirrored placements, each checked against ``simulate`` in
tests/unit/schedule (test_zb_v.py, test_v_shape.py, test_dualpipe.py, test_chimera.py, test_hanayo.py).

Letters: p = num_ranks, v = chunks_per_rank, m = num_microbatches, r a rank, f, i and w the times of one chunk's
forward, input gradient and weight gradient, b = i + w its whole backward, fb the time of an overlapped pair of a
forward and a backward. Latency is 0, and every stage costs the same. A *wait* is the makespan less the work of one
rank. A function returns None where its closed form does not hold.
"""

from __future__ import annotations


def makespan_zb_v(p: int, m: int, f: float, i: float, w: float) -> float | None:
    """f = i = w and m >= 2p-1: 6 m f + (p-1) f. None elsewhere."""
    return (6 * m + p - 1) * f if f == i == w and m >= 2 * p - 1 else None


def span_bubble_zb_v(p: int, m: int, f: float, i: float, w: float) -> float | None:
    """The largest wait between a rank's first start and last end, f = i >= w and m >= 2p-1: 2(p-1)(f-w); 0 for f = i =
    w. None elsewhere."""
    return 2 * (p - 1) * (f - w) if f == i >= w and m >= 2 * p - 1 else None


def wait_v_half(p: int, m: int) -> int | None:
    """In units of f = i = w, m >= p: 3p-4 for odd p, 3p-7 for even p; but 0 for p = 1 and 1 for p = 2. None for m < p.

    Checked for p up to 64.
    """
    if m < p:
        return None
    return p - 1 if p <= 2 else 3 * p - (4 if p % 2 else 7)


def wait_v_min(p: int, m: int) -> int | None:
    """In units of f = i = w, m >= p: 4p-5 for p = 1 modulo 3, else 4p-7; but 0 for p = 1. None for m < p.

    Checked for p up to 64.
    """
    if m < p:
        return None
    return 0 if p == 1 else 4 * p - (5 if p % 3 == 1 else 7)


def peak_activations_zb_v(p: int, m: int) -> tuple[int, ...]:
    """Chunk activations on each rank, from F until W, any m: min(2p, 2m, m + 1 + r); 2p everywhere for m >= 2p-1."""
    return tuple(min(2 * p, 2 * m, m + 1 + rank) for rank in range(p))


def peak_activations_v_half(p: int) -> int:
    """Chunk activations on the fullest rank, from F until W, m >= p: 2 floor((p+2)/2)."""
    return 2 * ((p + 2) // 2)


def peak_activations_v_min(p: int) -> int:
    """Chunk activations on the fullest rank, from F until W, m >= p: 2 floor((p+4)/3)."""
    return 2 * ((p + 4) // 3)


def wait_dualpipe(p: int, f: float, i: float, w: float, fb: float | None = None) -> float | None:
    """dualpipe, of the rank that waits longest, i <= f: (p/2-1)(fb + f - w - min(i, w)); fb None: f + b. None for i >
    f.

    The form of the DualPipe README, (p/2-1)(fb + b - 3w), is that of f = i >= w. With fb = f + b all ranks wait alike.
    """
    return _wait_dual(p // 2, f, i, w, fb)


def wait_dualpipe_v(p: int, f: float, i: float, w: float, fb: float | None = None) -> float | None:
    """dualpipe-v, of the rank that waits longest, i <= f: (p-1)(fb + f - w - min(i, w)); fb None: f + b. None for i >
    f. The form (p-1)(fb + b - 3w) is that of f = i >= w."""
    return _wait_dual(p, f, i, w, fb)


def peak_activations_dualpipe(p: int) -> int:
    """Activations on every rank, from F until B or W: p + 1."""
    return p + 1


def peak_activations_dualpipe_v(p: int) -> int:
    """Chunk activations on every rank, from F until B or W: 2p + 1."""
    return 2 * p + 1


def wait_chimera(p: int, m: int, f: float, b: float) -> float | None:
    """b >= f, m = n p: (p-2)(b + (n-1)(b-f)). None elsewhere.

    For m = p the waiting over the makespan is (p-2)/(2m+p-2) at b = f and (p-2)/(3m/2+p-2) at b = 2f.
    """
    if m % p or b < f:
        return None
    return (p - 2) * (b + (m // p - 1) * (b - f))


def peak_activations_chimera(p: int) -> tuple[int, ...]:
    """Activations on each rank, from F until B, m a multiple of p: p/2 + 1 + min(r, p-1-r). Other m: at most p."""
    return tuple(p // 2 + 1 + min(rank, p - 1 - rank) for rank in range(p))


def wait_hanayo(p: int, m: int, f: float, b: float) -> float | None:
    """Our hanayo table, any even v, m = n p: (p-1)(2 max(f, b) + 2(n-1)|b-f|). None for other m. No form of the paper:
    see the docstring of ``hanayo``."""
    return None if m % p else 2 * (p - 1) * (max(f, b) + (m // p - 1) * abs(b - f))


def messages_zigzag(p: int, v: int, m: int) -> int:
    """zb-v, v-half, v-min and dualpipe-v (v = 2), hanayo, both directions of one step: 2 m v (p-1)."""
    return 2 * m * v * (p - 1)


def messages_mirrored(p: int, m: int) -> int:
    """dualpipe and chimera, both directions of one step: 2 m (p-1)."""
    return 2 * m * (p - 1)


def _wait_dual(h: int, f: float, i: float, w: float, fb: float | None) -> float | None:
    pair = f + i + w if fb is None else fb
    return (h - 1) * (pair + f - w - min(i, w)) if i <= f else None
