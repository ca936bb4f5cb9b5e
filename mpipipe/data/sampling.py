"""Which window is sample i of a run: a pure function of seed and position, so that every rank, and every resume,
comes to the same answer.

The samples of a run are numbered 0, 1, 2, ...; sample i belongs to epoch ``i // num_windows``. Each epoch visits
every window once, in an order of its own. The order is a keyed bijection (a Feistel network with cycle walking: Black
and Rogaway 2002, "Ciphers with arbitrary finite domains"), so nothing is stored and any position is reached in
constant time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

UInt64 = npt.NDArray[np.uint64]

_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: UInt64) -> UInt64:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014); uint64 arrays, wrapping."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index: npt.ArrayLike, n: int, key: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """A bijection of 0 .. n-1 for each key: int64 of the shape of ``index``.

    ``index``: integers in 0 .. n-1. ``key``: a number of 64 bits, or an array of them that fits ``index``. Raises
    ValueError outside.
    """
    position = np.asarray(index, dtype=np.int64)
    if n < 1 or (position.size and (int(position.min()) < 0 or int(position.max()) >= n)):
        raise ValueError(f"positions within 0 .. {n - 1} are needed")
    flat = position.reshape(-1).astype(np.uint64)
    keys = np.broadcast_to(np.asarray(key, dtype=np.uint64), position.shape).reshape(-1)
    half = max(
        1, ((n - 1).bit_length() + 1) // 2
    )  # bits of each of the two halves: the network's domain is 4^half >= n
    result = _feistel(flat, keys, half)
    outside = np.flatnonzero(result >= n)
    while outside.size:  # walk the cycle until it comes back inside: still a bijection, under four rounds on average
        result[outside] = _feistel(result[outside], keys[outside], half)
        outside = outside[result[outside] >= n]
    return result.astype(np.int64).reshape(position.shape)


def _feistel(x: UInt64, keys: UInt64, half: int) -> UInt64:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> shift, x & mask
    for number in range(1, _ROUNDS + 1):
        salt = _mix(keys + np.uint64(number * _GOLDEN % 2**64))
        left, right = right, left ^ (_mix(right ^ salt) & mask)
    return (left << shift) | right


def sample_windows(seed: int, start: int, count: int, num_windows: int, shuffle: bool) -> npt.NDArray[np.int64]:
    """The windows of the samples start .. start+count-1: int64 (count,), each in 0 .. num_windows-1.

    Without ``shuffle`` every epoch goes through the windows in order. Raises ValueError where there is no window.
    """
    if num_windows < 1:
        raise ValueError("there is no window to sample from")
    samples = np.arange(start, start + count, dtype=np.int64)
    epochs, positions = np.divmod(samples, num_windows)
    if not shuffle or not count:
        return positions
    first = int(epochs[0])
    keys = [xxhash.xxh3_64_intdigest(f"{seed}/{epoch}/windows".encode()) for epoch in range(first, int(epochs[-1]) + 1)]
    return permute(positions, num_windows, np.asarray(keys, dtype=np.uint64)[epochs - first])
