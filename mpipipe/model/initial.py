"""Initial weights keyed by (seed, global parameter name): the same bits whatever is built where and in which order."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from mpipipe.model.draw import stable_key

DEVIATION = 0.02  # Radford et al. 2019 (GPT-2), as in its public code

_RESIDUAL_ENDS = (".attention.out.weight", ".mlp.down.weight")


@torch.no_grad()
def fill_parameters(
    layer: nn.Module, layer_name: str, seed: int, num_blocks: int, primary: Mapping[str, str] | None = None
) -> None:
    """Fill every parameter of ``layer`` in place, float32 on the CPU.

    Matrices: normal with deviation 0.02, the projections that end in the residual stream 0.02 / sqrt(2 *
    ``num_blocks``). One-dimensional weights (norms): ones. Biases: zeros. ``primary`` maps the name of a tied copy to
    the name whose values it takes, so that the copies on two ranks agree. Torch's CPU generator takes the low 32 bits
    of a key.
    """
    generator = torch.Generator()
    for local_name, parameter in layer.named_parameters():
        name = f"{layer_name}.{local_name}"
        if name.endswith(".bias"):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            deviation = DEVIATION / math.sqrt(2 * num_blocks) if name.endswith(_RESIDUAL_ENDS) else DEVIATION
            generator.manual_seed(stable_key(f"{seed}/{(primary or {}).get(name, name)}"))
            parameter.normal_(0.0, deviation, generator=generator)
