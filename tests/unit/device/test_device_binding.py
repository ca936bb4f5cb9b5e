"""Which GPU a rank takes."""

from __future__ import annotations

import pytest

from mpipipe.device import choose_device, shared_devices
from mpipipe.errors import DeviceBindingError


@pytest.mark.parametrize(
    "num_visible, local_size, expected",
    [
        (1, 1, [0]),
        (1, 4, [0, 0, 0, 0]),  # each sees its own, or all share one
        (4, 4, [0, 1, 2, 3]),
        (8, 3, [0, 1, 2]),
        (2, 4, [0, 1, 0, 1]),
        (3, 7, [0, 1, 2, 0, 1, 2, 0]),
    ],
)
def test_ranks_of_a_node_take_its_gpus_in_turn(num_visible: int, local_size: int, expected: list[int]) -> None:
    assert [choose_device(num_visible, rank, local_size) for rank in range(local_size)] == expected


def test_without_a_gpu_there_is_none_to_take() -> None:
    with pytest.raises(DeviceBindingError, match=r'comm\.device = "cuda": rank 1 of 2 ranks on this node sees no GPU'):
        choose_device(0, 1, 2)
    assert DeviceBindingError.exit_code == 3


@pytest.mark.parametrize("local_rank, local_size", [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_is_not_on_the_node(local_rank: int, local_size: int) -> None:
    with pytest.raises(ValueError, match=f"local rank {local_rank} of {local_size}"):
        choose_device(1, local_rank, local_size)


def test_ranks_that_share_a_gpu_are_named() -> None:
    places = [("n1", "A"), ("n1", "B"), ("n1", "A"), ("n2", "C"), ("n1", "A")]
    assert shared_devices(places) == (
        "ranks 0, 2 and 4 share one GPU of node n1 (A): they wait for each other; start as many ranks on a node as it "
        "has GPUs"
    )


def test_further_shared_gpus_are_counted() -> None:
    places = [("n1", "A"), ("n1", "A"), ("n2", "C"), ("n2", "C"), ("n3", "D"), ("n3", "D")]
    assert shared_devices(places).startswith("ranks 0 and 1 share one GPU of node n1 (A), and 2 other GPUs likewise: ")
    assert "1 other GPU likewise" in shared_devices(places[:4])


def test_ranks_with_gpus_of_their_own_are_no_warning() -> None:
    assert shared_devices([("n1", "A"), ("n1", "B"), ("n2", "C")]) == ""


def test_ranks_on_the_cpu_share_nothing() -> None:
    assert shared_devices([("n1", ""), ("n1", ""), ("n1", "A")]) == ""
    assert shared_devices([]) == ""
