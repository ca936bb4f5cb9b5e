"""Dropout masks depend on seed, step, sample and name, never on the microbatch they are drawn in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mpipipe.errors import EngineError
from mpipipe.model import Block, Draw, Embedding, fill_parameters


def masks(draw: Draw, rate: float = 0.25, name: str = "blocks.0.mlp", shape: tuple[int, ...] = (16, 32)) -> Tensor:
    return draw.dropout(torch.ones(len(draw.samples), *shape), rate, name)


def test_mask_of_a_sample_does_not_depend_on_the_split() -> None:
    whole = masks(Draw(1, 2, tuple(range(8))))
    for split in ([1] * 8, [3, 3, 2], [5, 3]):
        parts, at = [], 0
        for size in split:
            parts.append(masks(Draw(1, 2, tuple(range(at, at + size)))))
            at += size
        assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(masks(Draw(1, 2, (7, 0))), whole[[7, 0]])


def test_mask_changes_with_each_part_of_its_key() -> None:
    one = masks(Draw(1, 2, (3,)))
    others = [
        masks(Draw(2, 2, (3,))),
        masks(Draw(1, 3, (3,))),
        masks(Draw(1, 2, (4,))),
        masks(Draw(1, 2, (3,)), name="blocks.1.mlp"),
        masks(Draw(1, 2, (3,)), name="blocks.0.attention"),
    ]
    for number, other in enumerate(others):
        assert not torch.equal(one, other), number
    assert len({tuple(mask.flatten().tolist()) for mask in others}) == 5
    assert torch.equal(one, masks(Draw(1, 2, (3,))))  # a recompute sees the same mask


def test_values_and_rate() -> None:
    found = masks(Draw(0, 0, tuple(range(64))))
    values = found.unique()
    assert torch.equal(values, torch.tensor([0.0, 1 / 0.75]))
    assert (found == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert masks(Draw(0, 0, (1,)), rate=0.0).equal(torch.ones(1, 16, 32))


def test_gradient_goes_through_the_same_mask() -> None:
    x = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    Draw(0, 0, (10, 11)).dropout(x, 0.5, "x").sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, Draw(0, 0, (10, 11)).dropout(torch.ones(2, 5, 7), 0.5, "x"))


def test_layers_use_their_draw_and_none_without_it() -> None:
    block = Block("blocks.0", 8, 2, 16, 0.5, 1e-5)
    fill_parameters(block, "blocks.0", 0, 1)
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    state = torch.get_rng_state()
    both = block(x, Draw(0, 0, (0, 1)))
    assert torch.equal(both, torch.cat([block(x[:1], Draw(0, 0, (0,))), block(x[1:], Draw(0, 0, (1,)))]))
    assert not torch.equal(both, block(x))
    assert torch.equal(block(x), block(x))
    assert torch.equal(torch.get_rng_state(), state)
    embedding = Embedding("embedding", 11, 4, 8, 0.5)
    fill_parameters(embedding, "embedding", 0, 1)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    assert (embedding(tokens, Draw(0, 0, (0,))) == 0).any()
    assert not (embedding(tokens) == 0).any()


def test_refusals() -> None:
    with pytest.raises(EngineError, match="a batch of 2 sequences and the names of 1 samples"):
        Draw(0, 0, (5,)).dropout(torch.ones(2, 3), 0.1, "x")
    with pytest.raises(EngineError, match=r"model\.dropout"):
        Draw(0, 0, (5,)).dropout(torch.ones(1, 3), 1.0, "x")
