"""Norm of a gradient whose parts lie on many ranks, with the same bits however they lie."""

from __future__ import annotations

from collections.abc import Mapping

import torch

BLOCK_ELEMENTS = 65_536
"""Elements of a block. Sums within a block are torch's, sums of blocks and of parameters go in order, in float64."""

_CLIP_EPSILON = 1e-6


def square_sums(
    gradients: Mapping[str, torch.Tensor], factor: float | None = None, *, blocks_at_once: int = 1
) -> dict[str, float]:
    """Sum of squares of each parameter's gradient (contiguous, any shape): float64 sums over blocks of 65,536 elements,
    added in order. With ``factor`` the gradients are first multiplied by it, in place.

    ``blocks_at_once``: blocks that are multiplied and then summed together. One at a time is a single pass over a CPU's
    memory; on a GPU all together are few kernels. The device is waited for once, for all sums.
    """
    sums: list[torch.Tensor] = []
    blocks_of = {}
    for name, gradient in gradients.items():
        blocks = 0
        for piece in gradient.view(-1).split(blocks_at_once * BLOCK_ELEMENTS):
            if factor is not None:
                piece.mul_(factor)
            whole = piece.numel() // BLOCK_ELEMENTS
            if piece.numel() > BLOCK_ELEMENTS:
                rows = piece[: whole * BLOCK_ELEMENTS].view(whole, BLOCK_ELEMENTS)
                sums.append(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64))
                piece = piece[whole * BLOCK_ELEMENTS :]
                blocks += whole
                if not piece.numel():
                    continue
            sums.append(torch.linalg.vector_norm(piece, dtype=torch.float64).view(1))
            blocks += 1
        blocks_of[name] = blocks
    norms = torch.cat(sums).square_().tolist() if sums else []
    found, start = {}, 0
    for name, blocks in blocks_of.items():
        total = 0.0
        for square in norms[start : start + blocks]:
            total += square
        found[name] = total
        start += blocks
    return found


def clip_factor(norm: float, clip_norm: float) -> float | None:
    """What to multiply every gradient with, or None where nothing is to be clipped.

    As torch.nn.utils.clip_grad_norm_: clip_norm / (norm + 1e-6), if that is below 1. ``clip_norm`` 0 never clips.
    """
    if clip_norm <= 0.0:
        return None
    factor = clip_norm / (norm + _CLIP_EPSILON)
    return factor if factor < 1.0 else None
