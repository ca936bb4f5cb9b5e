"""Sampling: a bijection in every epoch, a pure function of seed and position."""

from __future__ import annotations

import numpy as np
import pytest

from mpipipe.data import permute, sample_windows


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 16, 17, 63, 64, 65, 1000, 4097])
def test_permute_is_a_bijection(n: int) -> None:
    for key in (0, 1, 2**64 - 1):
        assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


def test_permute_takes_single_positions_and_a_key_each() -> None:
    whole = permute(np.arange(100), 100, 5)
    assert [int(permute(i, 100, 5)) for i in (0, 50, 99)] == whole[[0, 50, 99]].tolist()
    keys = np.array([5, 6, 5], dtype=np.uint64)
    assert permute(np.array([1, 2, 3]), 100, keys).tolist() == [
        whole[1],
        int(permute(2, 100, 6)),
        whole[3],
    ]
    assert permute(np.array([], dtype=np.int64), 3, 0).shape == (0,)


def test_permute_is_fair_over_keys() -> None:
    firsts = permute(np.zeros(12_000, dtype=np.int64), 6, np.arange(12_000))
    counts = np.bincount(firsts, minlength=6)
    assert np.abs(counts - 2000).max() < 200  # five standard deviations of a fair draw


def test_permute_refuses_what_is_outside() -> None:
    for index, n in ((3, 3), (-1, 3), (0, 0)):
        with pytest.raises(ValueError, match="positions within"):
            permute(index, n, 0)


def test_every_epoch_visits_every_window_once_in_its_own_order() -> None:
    n = 50
    epochs = [sample_windows(3, epoch * n, n, n, True) for epoch in range(4)]
    for epoch in epochs:
        assert np.array_equal(np.sort(epoch), np.arange(n))
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 4
    assert not np.array_equal(epochs[0], sample_windows(4, 0, n, n, True))


def test_any_cut_of_the_run_gives_the_same_samples() -> None:
    whole = sample_windows(1, 0, 230, 50, True)
    for size in (1, 7, 50, 64):
        pieces = [sample_windows(1, start, min(size, 230 - start), 50, True) for start in range(0, 230, size)]
        assert np.array_equal(np.concatenate(pieces), whole)


def test_values_that_stay() -> None:
    """The order is part of what a resumed run relies on: these figures must never change."""
    assert sample_windows(0, 0, 12, 10, True).tolist() == [5, 2, 8, 3, 0, 7, 1, 6, 9, 4, 2, 6]
    assert sample_windows(7, 10**12, 3, 1 << 40, True).tolist() == [820578799471, 1098045525814, 191107683495]


def test_without_shuffle_in_order_and_around() -> None:
    found = sample_windows(0, 8, 5, 10, False)
    assert (found.dtype.name, found.tolist()) == ("int64", [8, 9, 0, 1, 2])
    assert sample_windows(0, 4, 0, 10, True).shape == (0,)
    assert sample_windows(0, 0, 3, 1, True).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="no window"):
        sample_windows(0, 0, 1, 0, True)
