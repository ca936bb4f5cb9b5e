"""The token loss as a sum and a count: sums of microbatches add up to the loss of the step, whatever their sizes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED_LABEL = -100


def token_loss(output_BSV: Tensor, target_BS: Tensor) -> tuple[Tensor, int | Tensor]:
    """Sum of the token cross entropies in nats (0-d float64) and the number of valid labels.

    B: microbatch, S: sequence, V: vocabulary. ``output_BSV``: scores in any float type, the cross entropy is taken in
    float32. ``target_BS``: int64 labels, -100 is left out. The count is an int for CPU tensors and a 0-d int64 tensor
    on a device, so that nothing waits for the device. Without a valid label: sum 0, count 0, zero gradients.
    """
    scores_NV = output_BSV.reshape(-1, output_BSV.shape[-1]).float()
    target_N = target_BS.reshape(-1)
    losses_N = F.cross_entropy(scores_NV, target_N, ignore_index=IGNORED_LABEL, reduction="none")
    count = (target_N != IGNORED_LABEL).sum()
    return losses_N.sum(dtype=torch.float64), int(count) if count.device.type == "cpu" else count
