"""Initial weights depend on seed and name only."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
import xxhash
from torch import Tensor, nn

from mpipipe.model import ModelLayers, gpt2_layers, stable_key


@dataclass(frozen=True)
class Shape:
    family: str = "gpt2"
    layers: int = 12
    hidden: int = 32
    heads: int = 4
    ffn_hidden: int | None = None
    vocab: int = 101
    sequence: int = 16
    dropout: float = 0.0
    tie_embeddings: bool = True
    norm_eps: float = 1e-5


def weights(model: ModelLayers, order: list[int]) -> dict[str, Tensor]:
    layers: dict[int, nn.Module] = {index: model.factories[index]() for index in order}
    return {
        f"{model.names[i]}.{local}": p.detach() for i, layer in layers.items() for local, p in layer.named_parameters()
    }


def test_any_order_of_building_gives_the_same_bits() -> None:
    model = gpt2_layers(Shape(), seed=7)
    order = list(range(len(model.names)))
    first = weights(model, order)
    torch.manual_seed(99)  # torch's own generator is neither read nor moved
    state = torch.get_rng_state()
    second = weights(gpt2_layers(Shape(), seed=7), order[::-1])
    assert torch.equal(torch.get_rng_state(), state)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(
        first["blocks.0.mlp.up.weight"], weights(gpt2_layers(Shape(), seed=8), [1])["blocks.0.mlp.up.weight"]
    )


def test_no_two_matrices_are_equal_and_deviations_are_gpt2s() -> None:
    found = weights(gpt2_layers(Shape(tie_embeddings=False), seed=0), list(range(14)))
    matrices = {name: p for name, p in found.items() if p.dim() == 2}
    assert len(matrices) == 2 + 4 * 12 + 1
    for (one, a), (two, b) in itertools.combinations(matrices.items(), 2):
        assert a.shape != b.shape or not torch.equal(a, b), (one, two)
    for name, matrix in matrices.items():
        wanted = 0.02 / math.sqrt(24) if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.02
        assert matrix.std().item() == pytest.approx(wanted, rel=0.12), name
        assert abs(matrix.mean().item()) < 5 * wanted / math.sqrt(matrix.numel()), name
    for name, vector in found.items():
        if vector.dim() == 1:
            assert torch.equal(vector, torch.full_like(vector, 0.0 if name.endswith("bias") else 1.0)), name


def test_tied_head_has_the_embeddings_values_and_an_untied_one_its_own() -> None:
    tied = weights(gpt2_layers(Shape(), seed=0), [0, 13])
    assert torch.equal(tied["head.weight"], tied["embedding.tokens.weight"])
    untied = weights(gpt2_layers(Shape(tie_embeddings=False), seed=0), [0, 13])
    assert torch.equal(untied["embedding.tokens.weight"], tied["embedding.tokens.weight"])
    assert not torch.equal(untied["head.weight"], tied["head.weight"])


def test_keys_are_stable_63_bit_hashes() -> None:
    assert stable_key("0/blocks.0.mlp.up.weight") == xxhash.xxh3_64_intdigest(b"0/blocks.0.mlp.up.weight") % 2**63
    assert stable_key("0/blocks.0.mlp.up.weight") == 5957601926927384708
