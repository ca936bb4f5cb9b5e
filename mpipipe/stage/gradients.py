"""How gradients add up over the microbatches of a step."""

from __future__ import annotations

import torch


class Gradient:
    """The running total of one parameter's gradient.

    A microbatch's gradient arrives whole: autograd has already added up the parameter's uses within that microbatch.
    Totals are float32 whatever the parameter's type, so that their error does not grow with the number of microbatches.
    The memory is allocated once and stays this object's; a parameter that no microbatch used has gradient zero.
    """

    __slots__ = ("_empty", "total")

    def __init__(self, parameter: torch.Tensor) -> None:
        self.total = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        self._empty = True

    def add(self, gradient: torch.Tensor) -> None:
        """Add one microbatch's gradient, of the parameter's shape."""
        if self._empty:
            self.total.copy_(gradient)
            self._empty = False
        else:
            self.total.add_(gradient)

    def clear(self) -> None:
        """Begin a new step."""
        self._empty = True

    def finish(self) -> torch.Tensor:
        """The total, shape of the parameter, float32. It stays valid until ``clear``."""
        if self._empty:
            self.total.zero_()
            self._empty = False
        return self.total
