"""What goes from layer to layer and from stage to stage for one microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mpipipe.stage.nested import TENSOR, Nested, Spec, rebuild


@dataclass(slots=True)
class Activation:
    """The output of a layer: ``tensors`` detached, contiguous and aligned; ``needs`` which of them take a gradient (an
    integer mask does not, nor what was detached); ``spec`` how they make up the value.
    """

    tensors: Sequence[torch.Tensor]
    needs: tuple[bool, ...]
    spec: Spec = TENSOR

    @property
    def value(self) -> Nested:
        """As the layer returned it, of the tensors here."""
        return rebuild(self.spec, self.tensors)

    def enter(self, trained: bool) -> tuple[Nested, list[torch.Tensor]]:
        """(The value as the next layer takes it, its leaves: the tensors that a gradient is taken of).

        The tensors are new ones in the same memory. ``trained``: False for a layer that makes no backward.
        """
        if not self.spec:
            leaf = self.tensors[0].detach()
            return (leaf.requires_grad_(), [leaf]) if trained and self.needs[0] else (leaf, [])
        leaves, given = [], []
        for tensor, needed in zip(self.tensors, self.needs, strict=True):
            leaf = tensor.detach()
            given.append(leaf)
            if trained and needed:
                leaves.append(leaf.requires_grad_())
        return rebuild(self.spec, given), leaves
