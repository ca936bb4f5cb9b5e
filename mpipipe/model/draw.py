"""Random numbers known by what they are for: a dropout mask depends on seed, step, sample and name, never on who
draws what before.

Masks are therefore the same for any ranks, chunks, schedule and microbatch size, and a recomputed forward has the
masks of the first. Torch's CPU generator takes the low 32 bits of a key, its CUDA generator all 63; masks differ
between the two kinds of device.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from mpipipe.errors import EngineError

_KEY_MASK = 2**63 - 1


def stable_key(text: str) -> int:
    """A 63-bit key of a text (xxh3): the same on every machine and in every process."""
    return xxhash.xxh3_64_intdigest(text.encode()) & _KEY_MASK


@dataclass(slots=True)
class Draw:
    """The random numbers of one microbatch: run seed, optimizer step, and the global index of each sequence in the
    microbatch, in order.
    """

    seed: int
    step: int
    samples: tuple[int, ...]

    def dropout(self, x: Tensor, rate: float, name: str) -> Tensor:
        """``x`` (microbatch, ...) with elements zeroed with probability ``rate`` and the others divided by 1 -
        ``rate``.

        The mask of sample i depends on (seed, step, ``samples[i]``, ``name``) and the shape of one sample only.
        ``rate`` in [0, 1). Raises EngineError where the samples are not as many as the batch.
        """
        if not 0.0 <= rate < 1.0:
            raise EngineError(f"dropout rate {rate} of {name}: model.dropout must be at least 0 and below 1")
        if x.shape[0] != len(self.samples):
            raise EngineError(
                f"{name} got a batch of {x.shape[0]} sequences and the names of {len(self.samples)} samples"
            )
        if rate == 0.0:
            return x
        kept = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        generator = torch.Generator(device=x.device)
        base = stable_key(f"{self.seed}/{self.step}/{name}")
        for row, sample in zip(kept, self.samples, strict=True):
            generator.manual_seed(xxhash.xxh3_64_intdigest(struct.pack("<qq", base, sample)) & _KEY_MASK)
            row.bernoulli_(1.0 - rate, generator=generator)
        return (x * kept).mul_(1.0 / (1.0 - rate))


class KeyedLayer(nn.Module):
    """A layer that takes its random numbers from a ``Draw``: ``forward(x, draw=None)``; without a draw there is no
    dropout (evaluation).

    ``layer_name`` is the layer's global name: parameter ``x`` of the layer is known everywhere as ``layer_name.x``.
    """

    def __init__(self, layer_name: str) -> None:
        super().__init__()
        self.layer_name = layer_name

    def forward(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = super().__call__(*args, **kwargs)
        return output
