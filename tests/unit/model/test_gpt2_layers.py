"""The GPT-2 layers against their descriptions and against a plain computation written apart."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from mpipipe.errors import ConfigError
from mpipipe.model import Draw, ModelLayers, gpt2_layers, token_loss
from mpipipe.partition import make_partition


@dataclass(frozen=True)
class Shape:
    family: str = "gpt2"
    layers: int = 3
    hidden: int = 24
    heads: int = 3
    ffn_hidden: int | None = None
    vocab: int = 37
    sequence: int = 10
    dropout: float = 0.0
    tie_embeddings: bool = True
    norm_eps: float = 1e-5


def run(layers: list[nn.Module], x: Tensor, draw: Draw | None = None) -> Tensor:
    for layer in layers:
        x = layer(x, draw)
    return x


def named(model: ModelLayers, layers: list[nn.Module]) -> dict[str, Tensor]:
    return {
        f"{name}.{local}": parameter
        for name, layer in zip(model.names, layers, strict=True)
        for local, parameter in layer.named_parameters()
    }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ffn_hidden", [None, 40])
def test_described_parameters_are_the_built_ones(tied: bool, ffn_hidden: int | None) -> None:
    model = gpt2_layers(Shape(tie_embeddings=tied, ffn_hidden=ffn_hidden), seed=1)
    assert model.names == ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
    for name, factory, description in zip(model.names, model.factories, model.descriptions, strict=True):
        built = tuple((f"{name}.{local}", tuple(p.shape)) for local, p in factory().named_parameters())
        assert built == description.parameters
    assert model.tied == ([("embedding.tokens.weight", "head.weight")] if tied else [])


def plain_forward(p: dict[str, Tensor], shape: Shape, x: Tensor) -> Tensor:
    """The same model from its definition: explicit scores, mask, softmax, tanh GELU; float64."""

    def norm(h: Tensor, name: str) -> Tensor:
        centred = h - h.mean(-1, keepdim=True)
        return (
            centred / (centred.pow(2).mean(-1, keepdim=True) + shape.norm_eps).sqrt() * p[f"{name}.weight"]
            + p[f"{name}.bias"]
        )

    length, width = x.shape[1], shape.hidden // shape.heads
    hidden = p["embedding.tokens.weight"][x] + p["embedding.positions.weight"][:length]
    later = torch.ones(length, length).triu(1).bool()
    for index in range(shape.layers):
        at = f"blocks.{index}"
        q, k, v = (
            norm(hidden, f"{at}.norm1") @ p[f"{at}.attention.qkv.weight"].T + p[f"{at}.attention.qkv.bias"]
        ).chunk(3, -1)
        heads = []
        for head in range(shape.heads):
            part = slice(head * width, (head + 1) * width)
            scores = (q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(width)).masked_fill(later, -math.inf)
            heads.append(scores.softmax(-1) @ v[..., part])
        hidden = hidden + torch.cat(heads, -1) @ p[f"{at}.attention.out.weight"].T + p[f"{at}.attention.out.bias"]
        up = norm(hidden, f"{at}.norm2") @ p[f"{at}.mlp.up.weight"].T + p[f"{at}.mlp.up.bias"]
        up = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        hidden = hidden + up @ p[f"{at}.mlp.down.weight"].T + p[f"{at}.mlp.down.bias"]
    return norm(hidden, "head.norm") @ p["head.weight"].T


def test_loss_and_gradients_equal_a_plain_computation() -> None:
    shape = Shape()
    model = gpt2_layers(shape, seed=3)
    layers = [factory() for factory in model.factories]
    ours = named(model, layers)
    with torch.no_grad():  # biases and norms away from 0 and 1, else a lost one would go unseen
        generator = torch.Generator().manual_seed(5)
        for parameter in ours.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    theirs = {name: p.detach().double().requires_grad_() for name, p in ours.items()}
    tokens = torch.randint(0, shape.vocab, (2, shape.sequence + 1), generator=generator)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, 3] = -100

    total, count = token_loss(run(layers, inputs), targets)
    total.backward()
    log_probabilities = plain_forward(theirs, shape, inputs).log_softmax(-1)
    valid = targets != -100
    plain = -log_probabilities[valid].gather(1, targets[valid][:, None]).sum()
    plain.backward()

    assert count == 19
    assert total.dtype == torch.float64
    assert total.item() == pytest.approx(plain.item(), rel=1e-6)
    for name, parameter in ours.items():
        assert parameter.grad is not None
        assert theirs[name].grad is not None
        torch.testing.assert_close(parameter.grad.double(), theirs[name].grad, rtol=1e-4, atol=1e-5, msg=name)


def test_outputs_are_contiguous_and_shorter_sequences_run() -> None:
    shape = Shape(dropout=0.2)
    model = gpt2_layers(shape, seed=0)
    x = torch.zeros(2, 4, dtype=torch.int64)
    for factory in model.factories:
        x = factory()(x, Draw(0, 0, (0, 1)))
        assert x.is_contiguous()
    assert x.shape == (2, 4, 37)
    with pytest.raises(ConfigError, match=r"model\.sequence: a sequence of 11 tokens"):
        model.factories[0]()(torch.zeros(1, 11, dtype=torch.int64))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_described_activation_bytes_are_what_autograd_keeps(dropout: float) -> None:
    shape = Shape(dropout=dropout)
    model = gpt2_layers(shape, seed=0)
    x = torch.zeros(2, shape.sequence, dtype=torch.int64)
    for factory, description in zip(model.factories, model.descriptions, strict=True):
        layer = factory()
        parameters = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
        kept: dict[int, tuple[int, Tensor]] = {}

        def keep(
            tensor: Tensor, kept: dict[int, tuple[int, Tensor]] = kept, parameters: set[int] = parameters
        ) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage.nbytes(), tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            x = layer(x, Draw(0, 0, (0, 1)))
            if description.name == "head":
                token_loss(x, torch.zeros(2, shape.sequence, dtype=torch.int64))
        found = sum(nbytes for nbytes, _ in kept.values())
        constant = 4 if description.name == "head" else 0  # the loss keeps one float32 a microbatch
        assert found - constant == 2 * description.activation_bytes, description.name


def test_partition_of_the_built_model_keeps_all_parameters() -> None:
    model = gpt2_layers(Shape(layers=5), seed=0)
    for stages in (1, 2, 3, 5):
        partition = make_partition(model.descriptions, stages, "even")
        names = [
            f"{model.names[layer]}.{local}"
            for stage in range(stages)
            for layer in partition.layers_of(stage)
            for local, _ in model.factories[layer]().named_parameters()
        ]
        assert len(names) == len(set(names)) == 2 + 12 * 5 + 3


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"model\.family.*allowed: gpt2"):
        gpt2_layers(Shape(family="llama"), seed=0)
    with pytest.raises(ConfigError, match=r"model\.dropout"):
        gpt2_layers(Shape(dropout=1.0), seed=0)
    with pytest.raises(ConfigError, match=r"model\.hidden"):
        gpt2_layers(Shape(hidden=25), seed=0)
