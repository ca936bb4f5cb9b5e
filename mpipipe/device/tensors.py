"""What both kinds of device do with tensors, through torch alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mpipipe.device.protocol import ALIGNMENT, Buffer

_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)

TELLS_USES = _count is not None
"""Whether this torch tells how many tensors have a memory; with one that does not, no buffer is used again."""


def uses(tensor: torch.Tensor) -> int:
    """How many tensors have this one's memory, by torch's own count; 0 for a torch that does not tell."""
    return 0 if _count is None else _count(tensor.untyped_storage()._cdata)


def is_kept(buffer: Buffer) -> bool:
    """As ``Device.is_kept``."""
    return not TELLS_USES or (buffer.view is not None and uses(buffer.view) > buffer.uses)


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is contiguous and aligned, else a copy that is. Detached from any graph; the copy is
    made on torch's current stream.
    """
    detached = tensor.detach() if tensor.requires_grad else tensor
    if detached.is_conj() or detached.is_neg():
        detached = detached.resolve_conj().resolve_neg()
    if detached.is_contiguous() and detached.data_ptr() % ALIGNMENT == 0:
        return _usual_strides(detached) if 1 in detached.shape else detached
    return detached.clone(memory_format=torch.contiguous_format)


def _usual_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The contiguous tensor as a received one is strided. A dimension of size 1 may have any stride, and torch takes
    kernels of other bits by it, as for channels last.
    """
    stride, usual = 1, True
    for size, found in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        usual = usual and found == stride
        stride *= size
    return tensor if usual else tensor.view(-1).view(tensor.shape)
