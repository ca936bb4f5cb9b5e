"""The running total of a parameter's gradient."""

from __future__ import annotations

import pytest
import torch

from mpipipe.stage import Gradient


def test_what_is_added_comes_out_in_order() -> None:
    """1e8 + 1 - 1e8 in float32 is 0: additions one after another, no pairing."""
    gradient = Gradient(torch.zeros(2, 1))
    for value in (1e8, 1.0, -1e8):
        gradient.add(torch.full((2, 1), value))
    assert gradient.finish().tolist() == [[0.0], [0.0]]


def test_a_parameter_that_nothing_used_has_gradient_zero() -> None:
    gradient = Gradient(torch.zeros(3))
    gradient.add(torch.ones(3))
    gradient.clear()
    assert gradient.finish().tolist() == [0.0, 0.0, 0.0]


def test_a_new_step_begins_anew_in_the_same_memory() -> None:
    gradient = Gradient(torch.zeros(3))
    gradient.add(torch.ones(3))
    first = gradient.finish()
    first.mul_(0.5)
    gradient.clear()
    gradient.add(torch.full((3,), 4.0))
    gradient.add(torch.full((3,), 3.0))
    assert gradient.finish().tolist() == [7.0, 7.0, 7.0]
    assert gradient.finish().data_ptr() == first.data_ptr()


def test_the_first_gradient_is_copied_and_not_kept() -> None:
    gradient, given = Gradient(torch.zeros(2)), torch.ones(2)
    gradient.add(given)
    given.fill_(9.0)
    gradient.add(torch.ones(2))
    assert gradient.finish().tolist() == [2.0, 2.0]
    assert given.tolist() == [9.0, 9.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_totals_are_float32_whatever_comes(dtype: torch.dtype) -> None:
    """300 times 1 in bfloat16 stops at 256."""
    gradient = Gradient(torch.zeros(2, dtype=dtype))
    for _ in range(300):
        gradient.add(torch.ones(2, dtype=dtype))
    assert gradient.finish().dtype == torch.float32
    assert gradient.finish().tolist() == [300.0, 300.0]
