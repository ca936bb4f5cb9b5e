"""Splits: every layer exactly once, the smallest possible maximum, refusals in the user's keys."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipipe.errors import PartitionError
from mpipipe.partition import (
    LayerDescription,
    Partition,
    describe_costs,
    make_partition,
    split_by_cost,
    split_even,
    split_listed,
)
from mpipipe.partition.split import _interval_costs


def decoder(num_blocks: int, ends: tuple[float, float] = (0.0, 0.0)) -> list[LayerDescription]:
    blocks = [LayerDescription(f"blocks.{i}", (), 1.0, 2.0, 0, 0) for i in range(num_blocks)]
    embedding = LayerDescription("embedding", (), ends[0], 0.0, 0, 0, counted=False)
    return [embedding, *blocks, LayerDescription("head", (), ends[1], 0.0, 0, 0, counted=False)]


@pytest.mark.parametrize(
    ("n", "stages", "sizes"),
    [
        (48, 4, (12, 12, 12, 12)),
        (30, 4, (8, 8, 7, 7)),
        (10, 4, (3, 3, 2, 2)),
        (5, 3, (2, 2, 1)),
        (7, 7, (1,) * 7),
        (9, 1, (9,)),
    ],
)
def test_even(n: int, stages: int, sizes: tuple[int, ...]) -> None:
    assert split_even(n, stages) == sizes
    assert split_by_cost([0.1] * n, stages) == sizes  # equal costs, ties broken towards the even split


@given(st.integers(1, 60), st.integers(1, 20), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_every_layer_lies_on_exactly_one_stage(n: int, stages: int, by_cost: bool, rng: random.Random) -> None:
    layers = decoder(n, (rng.random() * 5, rng.random() * 5))
    if stages > n:
        with pytest.raises(PartitionError):
            make_partition(layers, stages, "cost" if by_cost else "even")
        return
    partition = make_partition(layers, stages, "cost" if by_cost else "even")
    assert [layer for stage in range(stages) for layer in partition.layers_of(stage)] == list(range(n + 2))
    assert sum(partition.sizes) == n
    assert min(partition.sizes) >= 1
    assert math.isclose(sum(partition.costs), sum(layer.flops for layer in layers))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 6))
@settings(max_examples=80, deadline=None)
def test_cost_split_is_the_best_of_all_splits(costs: list[int], stages: int) -> None:
    n = len(costs)
    if stages > n or not any(costs):
        return
    best = min(
        max(sum(costs[i:j]) for i, j in itertools.pairwise((0, *cuts, n)))
        for cuts in itertools.combinations(range(1, n), stages - 1)
    )
    sizes = split_by_cost(costs, stages)
    ends = list(itertools.accumulate(sizes))
    assert (len(sizes), ends[-1], min(sizes) >= 1) == (stages, n, True)
    assert max(sum(costs[end - size : end]) for end, size in zip(ends, sizes, strict=True)) == best


def test_cost_split_exact_cases() -> None:
    assert split_by_cost([3, 1, 1, 1, 5, 1], 3) == (1, 3, 2)
    assert split_by_cost([1, 1, 1, 10], 2) == (3, 1)
    assert split_by_cost([10, 1, 1, 1, 1, 1, 1], 3) == (1, 3, 3)  # the maximum is fixed; the rest is still evened out
    assert split_by_cost([0, 0, 0, 0], 3) == (2, 1, 1)
    assert split_by_cost([1e-30, 1e30, 1e-30], 3) == (1, 1, 1)


def test_cost_split_of_200_layers_on_64_stages() -> None:
    costs = [1.0 + i % 7 for i in range(200)]
    sizes = split_by_cost(costs, 64)
    ends = list(itertools.accumulate(sizes))
    largest = max(sum(costs[end - size : end]) for end, size in zip(ends, sizes, strict=True))
    count, filled = 1, 0.0  # the greedy filling to one less needs more stages: the maximum found can't be beaten
    for cost in costs:
        count, filled = (count, filled + cost) if filled + cost <= largest - 1 else (count + 1, cost)
    assert count > 64
    assert sizes == split_by_cost(costs, 64)


def test_head_is_paid_by_the_last_stage() -> None:
    partition = make_partition(decoder(8, (0.0, 12.0)), 2, "cost")  # a head worth four blocks
    assert partition.bounds == ((0, 7), (7, 10))
    assert partition.costs == (18.0, 18.0)
    assert str(partition).splitlines() == [
        "stage 0: layers embedding .. blocks.5, 50.0% of the cost",
        "stage 1: layers blocks.6 .. head, 50.0% of the cost",
    ]


def test_a_partition_in_words_with_layers_of_one_s_own() -> None:
    partition = make_partition(describe_costs([3, 1, 4]), 2, [1, 2])
    assert str(partition).splitlines() == [
        "stage 0: layer 0, 37.5% of the cost",
        "stage 1: layers 1 .. 2, 62.5% of the cost",
    ]


def test_listed() -> None:
    assert make_partition(decoder(5), 3, [1, 3, 1]).bounds == ((0, 2), (2, 5), (5, 7))
    assert make_partition(describe_costs([1, 2, 3]), 2, (2, 1)).bounds == ((0, 2), (2, 3))
    assert make_partition(decoder(1), 1, [1]) == Partition(((0, 3),), (1,), ("embedding", "blocks.0", "head"), (3.0,))


@pytest.mark.parametrize(
    ("sizes", "stages", "message"),
    [
        ([2, 2], 2, r"pipeline\.partition = \[2, 2\] sums to 4, but model\.layers is 5"),
        (
            [5],
            2,
            r"^pipeline\.partition = \[5\] is a list of 1, but pipeline\.ranks times pipeline\.chunks is 2 "
            r".allowed: a list of 2 that sums to 5",
        ),
        ([5, 0], 2, r"leaves stage 1 without a layer"),
        ([6, -1], 2, r"leaves stage 1 without a layer"),
    ],
)
def test_listed_split_that_does_not_add_up_is_refused(sizes: list[int], stages: int, message: str) -> None:
    with pytest.raises(PartitionError, match=message) as caught:
        make_partition(decoder(5), stages, sizes)
    assert caught.value.key == "pipeline.partition"
    with pytest.raises(PartitionError):
        split_listed(5, sizes, stages)


def test_too_many_stages_names_the_largest_number_of_chunks() -> None:
    message = r"^pipeline\.chunks = 3 times pipeline\.ranks = 4 makes 12 stages for 10 layers.*at most 2 with 4 ranks"
    with pytest.raises(PartitionError, match=message) as caught:
        make_partition(decoder(10), 12, "cost", ranks=4)
    assert (caught.value.key, caught.value.value) == ("pipeline.chunks", 3)
    with pytest.raises(PartitionError, match=r"^pipeline\.ranks = 4 is too many: .*at most 3 ranks") as caught:
        make_partition(decoder(3), 4, "even", ranks=4)
    assert caught.value.key == "pipeline.ranks"
    with pytest.raises(PartitionError, match=r"pipeline\.ranks times pipeline\.chunks at most 3"):
        make_partition(decoder(3), 4, [1, 1, 1, 0])


def test_other_refusals() -> None:
    with pytest.raises(PartitionError, match="'uneven' is not a partition"):
        make_partition(decoder(3), 2, "uneven")
    with pytest.raises(PartitionError, match="0 stages"):
        make_partition(decoder(3), 0, "even")
    for cost in (-1.0, math.nan, math.inf):
        with pytest.raises(PartitionError, match="the cost of layer 1 is"):
            split_by_cost([1.0, cost, 1.0], 2)


def test_the_costs_of_intervals_are_rounded_once() -> None:
    rng = random.Random(4)
    for scale in (1.0, 1e-300, 1e300):
        costs = [rng.random() * scale, 0.1 * scale, 3.0 * scale, 0.0, *(rng.random() * 1e-9 * scale for _ in range(6))]
        spans = _interval_costs(costs)
        for i in range(len(costs) + 1):
            for j in range(len(costs) + 1):
                assert spans[i, j] == (math.fsum(costs[i:j]) if i < j else math.inf), (i, j)
