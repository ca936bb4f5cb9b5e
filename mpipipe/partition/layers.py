"""What a layer is made of and what it costs, without building it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mpipipe.errors import ConfigError, PartitionError

Shape = tuple[int, ...]


class ModelShape(Protocol):
    """The part of the ``[model]`` section that fixes the shapes (the config room's section has these attributes)."""

    @property
    def family(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def ffn_hidden(self) -> int | None: ...
    @property
    def vocab(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def dropout(self) -> float: ...
    @property
    def tie_embeddings(self) -> bool: ...
    @property
    def norm_eps(self) -> float: ...


@dataclass(frozen=True)
class LayerDescription:
    """One layer of the model, without its weights.

    ``parameters``: global names and shapes, in the order in which the built module lists them. ``flops_forward`` and
    ``flops_backward``: per sequence. ``activation_bytes``: what autograd keeps from the forward until the backward,
    per sequence, the layer's input included. ``output_bytes``: what goes to the next layer, per sequence.
    ``counted``: whether the layer counts in a split (embedding and head do not: they go with the first and the last
    stage).
    """

    name: str
    parameters: tuple[tuple[str, Shape], ...]
    flops_forward: float
    flops_backward: float
    activation_bytes: int
    output_bytes: int
    counted: bool = True

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters; a tied weight counts in each layer that uses it."""
        return sum(math.prod(shape) for _, shape in self.parameters)

    @property
    def flops(self) -> float:
        """Forward and backward together, per sequence."""
        return self.flops_forward + self.flops_backward


def describe_gpt2(model: ModelShape, element_bytes: int = 4) -> list[LayerDescription]:
    """Embedding, blocks and head of a GPT-2 style decoder.

    FLOPs: two per multiply-add of every matrix product, the full S x S attention scores counted (Chowdhery et al.
    2022, appendix B), the backward twice the forward; additions, norms and activations left out. Activation bytes:
    the tensors that autograd keeps with ``F.scaled_dot_product_attention`` (no S x S matrix), at ``element_bytes`` an
    element; the head's figure includes the float32 log-probabilities that the loss keeps. Raises ConfigError where
    hidden does not divide by heads.
    """
    if model.hidden % model.heads:
        raise ConfigError(
            f"{model.hidden} does not divide by model.heads = {model.heads}",
            key="model.hidden",
            value=model.hidden,
            allowed=f"a multiple of {model.heads}",
        )
    block = [_describe_block(model, f"blocks.{index}", element_bytes) for index in range(model.layers)]
    return [_describe_embedding(model, element_bytes), *block, _describe_head(model, element_bytes)]


def _describe_embedding(model: ModelShape, element_bytes: int) -> LayerDescription:
    S, H, V = model.sequence, model.hidden, model.vocab
    mask_bytes = S * H if model.dropout > 0 else 0
    return LayerDescription(
        name="embedding",
        parameters=(("embedding.tokens.weight", (V, H)), ("embedding.positions.weight", (S, H))),
        flops_forward=float(S * H),  # one addition an element; there is no product
        flops_backward=2.0 * S * H,
        activation_bytes=8 * S + mask_bytes,
        output_bytes=S * H * element_bytes,
        counted=False,
    )


def _describe_block(model: ModelShape, name: str, element_bytes: int) -> LayerDescription:
    S, H, heads = model.sequence, model.hidden, model.heads
    F = model.ffn_hidden or 4 * H
    shapes: list[tuple[str, Shape]] = [
        ("norm1.weight", (H,)),
        ("norm1.bias", (H,)),
        ("attention.qkv.weight", (3 * H, H)),
        ("attention.qkv.bias", (3 * H,)),
        ("attention.out.weight", (H, H)),
        ("attention.out.bias", (H,)),
        ("norm2.weight", (H,)),
        ("norm2.bias", (H,)),
        ("mlp.up.weight", (F, H)),
        ("mlp.up.bias", (F,)),
        ("mlp.down.weight", (H, F)),
        ("mlp.down.bias", (H,)),
    ]
    products = 2.0 * S * (3 * H * H + H * H + 2 * H * F)  # qkv, out, up and down
    attention = 4.0 * S * S * H  # scores, and scores times values
    # 8 S H: x, norm1(x), q, k, v, attended, x + attention, norm2 of it; 2 S F: up and gelu(up); in float32: mean and
    # 1/deviation of two norms, and the log-sum-exp of each head
    kept = (8 * S * H + 2 * S * F) * element_bytes + 4 * S * (4 + heads)
    masks = 2 * S * H if model.dropout > 0 else 0
    return LayerDescription(
        name=name,
        parameters=tuple((f"{name}.{local}", shape) for local, shape in shapes),
        flops_forward=products + attention,
        flops_backward=2 * (products + attention),
        activation_bytes=kept + masks,
        output_bytes=S * H * element_bytes,
    )


def _describe_head(model: ModelShape, element_bytes: int) -> LayerDescription:
    S, H, V = model.sequence, model.hidden, model.vocab
    product = 2.0 * S * H * V
    return LayerDescription(
        name="head",
        parameters=(("head.weight", (V, H)), ("head.norm.weight", (H,)), ("head.norm.bias", (H,))),
        flops_forward=product,
        flops_backward=2 * product,
        activation_bytes=2 * S * H * element_bytes
        + 4 * S * V
        + 16 * S,  # with two norm figures and the label of each token
        output_bytes=S * V * element_bytes,
        counted=False,
    )


def describe_costs(costs: Sequence[float], names: Sequence[str] | None = None) -> list[LayerDescription]:
    """Descriptions of a user's own layers from one cost each (any unit, forward and backward together); all are
    counted.

    A third of the cost is taken as the forward's. Names default to the position: ``"0"``, ``"1"``, .... Bytes are
    unknown and zero.
    """
    labels = [str(index) for index in range(len(costs))] if names is None else list(names)
    if len(labels) != len(costs):
        raise PartitionError(f"{len(costs)} costs for {len(labels)} layers", key="layers")
    return [
        LayerDescription(name, (), float(cost) / 3, float(cost) * 2 / 3, 0, 0)
        for name, cost in zip(labels, costs, strict=True)
    ]
