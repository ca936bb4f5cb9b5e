"""Norm of a gradient whose parts lie on many ranks, with the same bits however they lie."""

from __future__ import annotations

import torch

BLOCK_ELEMENTS = 65_536
"""Elements of a block. Sums within a block are torch's, sums of blocks and of parameters go in order, in float64."""

_CLIP_EPSILON = 1e-6


def square_sum(gradient: torch.Tensor, factor: float | None = None) -> float:
    """Sum of squares of one parameter's gradient (contiguous, any shape): float64 sums over blocks of 65,536 elements,
    added in order. With ``factor`` the gradient is first multiplied by it, in place: both in one pass over memory.
    """
    total = 0.0
    for block in gradient.view(-1).split(BLOCK_ELEMENTS):
        if factor is not None:
            block.mul_(factor)
        total += float(torch.linalg.vector_norm(block, dtype=torch.float64).square().item())
    return total


def clip_factor(norm: float, clip_norm: float) -> float | None:
    """What to multiply every gradient with, or None where nothing is to be clipped.

    As torch.nn.utils.clip_grad_norm_: clip_norm / (norm + 1e-6), if that is below 1. ``clip_norm`` 0 never clips.
    """
    if clip_norm <= 0.0:
        return None
    factor = clip_norm / (norm + _CLIP_EPSILON)
    return factor if factor < 1.0 else None
