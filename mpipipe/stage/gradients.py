"""How gradients add up over the microbatches of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Gradient:
    """The running total of one parameter's gradient.

    A microbatch's gradient arrives whole: autograd has already added up the parameter's uses within that microbatch.
    Totals are float32 whatever the parameter's type, so that their error does not grow with the number of microbatches.
    The memory is allocated once and stays this object's; a parameter that no microbatch used has gradient zero.

    ``direct``: autograd can add to the total by itself, which is the parameter's ``grad`` then, while the gradient is
    still in the cache.
    """

    __slots__ = ("direct", "total")

    def __init__(self, parameter: torch.Tensor) -> None:
        self.total = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        self.direct = parameter.dtype == torch.float32 and parameter.is_leaf and parameter.requires_grad

    def add(self, gradient: torch.Tensor) -> None:
        """Add one microbatch's gradient, of the parameter's shape."""
        self.total.add_(gradient)

    def clear(self) -> None:
        """Begin a new step."""
        self.total.zero_()

    def finish(self) -> torch.Tensor:
        """The total, shape of the parameter, float32. It stays valid until ``clear``."""
        return self.total


def clear_all(gradients: Sequence[Gradient]) -> None:
    """``clear`` of each, in few operations."""
    if gradients:
        torch._foreach_zero_([gradient.total for gradient in gradients])
