"""The call of torch's autograd engine that the backwards of all layers go through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Variable

_run_backward: Callable[..., Any] | None = getattr(getattr(Variable, "_execution_engine", None), "run_backward", None)
"""What ``torch.autograd.grad`` ends in, after checks of its arguments in Python: a quarter of its time for a small
layer. Private to torch, so it may be gone in another version.
"""


def gradients_of(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    """The gradient of each input, None where no output depends on it; frees the graph.

    ``gradients``: one for each output, of its shape and dtype.
    """
    if _run_backward is None:
        return torch.autograd.grad(list(outputs), list(inputs), list(gradients), allow_unused=True)
    found: Sequence[torch.Tensor | None] = _run_backward(
        tuple(outputs), tuple(gradients), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return found


def add_gradients(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> None:
    """As ``gradients_of``, and add the gradient of each input, a leaf, to its ``grad`` as soon as it is made."""
    if _run_backward is None:
        torch.autograd.backward(list(outputs), list(gradients), inputs=list(inputs))
    else:
        _run_backward(
            tuple(outputs), tuple(gradients), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=True
        )
