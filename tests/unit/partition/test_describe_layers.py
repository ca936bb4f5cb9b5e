"""Layer descriptions: names, shapes and FLOPs in exact figures."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mpipipe.errors import ConfigError, PartitionError
from mpipipe.partition import describe_costs, describe_gpt2


@dataclass(frozen=True)
class Shape:
    family: str = "gpt2"
    layers: int = 12
    hidden: int = 768
    heads: int = 12
    ffn_hidden: int | None = None
    vocab: int = 50257
    sequence: int = 1024
    dropout: float = 0.0
    tie_embeddings: bool = True
    norm_eps: float = 1e-5


def test_gpt2_small_has_its_known_number_of_parameters() -> None:
    layers = describe_gpt2(Shape())
    assert sum(layer.num_parameters for layer in layers) - 50257 * 768 == 124_439_808  # the published count, tied


def test_names_and_what_counts() -> None:
    layers = describe_gpt2(Shape(layers=11))
    assert [layer.name for layer in layers] == ["embedding", *(f"blocks.{i}" for i in range(11)), "head"]
    assert [layer.counted for layer in layers] == [False] + [True] * 11 + [False]
    names = [name for layer in layers for name, _ in layer.parameters]
    assert len(names) == len(set(names)) == 2 + 12 * 11 + 3
    assert ("blocks.10.attention.qkv.weight", (2304, 768)) in layers[11].parameters


def test_figures_of_a_small_model() -> None:
    embedding, block, head = describe_gpt2(Shape(layers=1, hidden=8, heads=2, ffn_hidden=20, vocab=50, sequence=4))
    # qkv 2*4*8*24, out 2*4*8*8, up and down 2*4*8*20 each; scores and their product with the values 2*4*4*8 each
    assert block.flops_forward == 1536 + 512 + 1280 + 1280 + 256 + 256
    assert block.flops_backward == 2 * block.flops_forward
    assert block.flops == 3 * block.flops_forward
    assert head.flops_forward == 2 * 4 * 8 * 50
    assert (embedding.output_bytes, block.output_bytes, head.output_bytes) == (128, 128, 800)
    assert block.activation_bytes == 8 * 4 * 8 * 4 + 2 * 4 * 20 * 4 + 4 * 4 * (4 + 2)


def test_hidden_that_does_not_divide_by_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.hidden: 10 does not divide by model\.heads = 4"):
        describe_gpt2(Shape(hidden=10, heads=4))


def test_costs_of_own_layers() -> None:
    layers = describe_costs([3, 6.0])
    assert [(layer.name, layer.counted, layer.flops) for layer in layers] == [("0", True, 3.0), ("1", True, 6.0)]
    with pytest.raises(PartitionError, match="2 costs for 1 layers"):
        describe_costs([1, 2], ["only"])
