"""What ``bench_engine.py`` trains: the same layers, weights and batch for mpipipe and for its peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Case:
    """What is trained. ``m``: microbatches a step; ``v``: stages a rank; ``layers``: layers of each stage, first to
    last; ``sizes``: of the model; ``folder``: where mpipipe keeps its run.
    """

    model: str
    schedule: str
    p: int
    v: int
    m: int
    layers: tuple[int, ...]
    sizes: dict[str, int]
    warm: int
    steps: int
    trace: bool = True
    folder: str = ""

    @property
    def microbatch(self) -> int:
        """Rows of one microbatch."""
        return 1 if self.model == "gpt" else self.sizes["rows"]


class Embedding(nn.Module):
    """Token ids (rows, sequence) to (rows, sequence, hidden)."""

    def __init__(self, vocab: int, sequence: int, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = nn.Parameter(torch.zeros(sequence, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tokens(x) + self.positions


class Block(nn.Module):
    """A pre-norm decoder block."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Head(nn.Module):
    """Final norm and the product with the vocabulary."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


def make_layer(case: Case, index: int) -> nn.Module:
    """Layer ``index`` of the whole model; its weights depend on ``index`` only."""
    torch.manual_seed(1000 + index)
    sizes = case.sizes
    if case.model != "gpt":
        return nn.Linear(sizes["width"], sizes["width"])
    if index == 0:
        return Embedding(sizes["vocab"], sizes["sequence"], sizes["hidden"])
    if index == sum(case.layers) - 1:
        return Head(sizes["vocab"], sizes["hidden"])
    return Block(sizes["hidden"], sizes["heads"])


def make_stage(case: Case, stage: int) -> nn.Sequential:
    """All layers of one stage."""
    first = sum(case.layers[:stage])
    return nn.Sequential(*(make_layer(case, index) for index in range(first, first + case.layers[stage])))


def make_batch(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step, the same at every step."""
    generator = torch.Generator().manual_seed(1)
    rows = case.m * case.microbatch
    if case.model == "gpt":
        tokens = torch.randint(0, case.sizes["vocab"], (rows, case.sizes["sequence"] + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return torch.randn(rows, case.sizes["width"], generator=generator), torch.zeros(rows, case.sizes["width"])


def loss_of(case: Case, reduction: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The mean or the sum over a microbatch."""
    if case.model == "gpt":
        return lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction=reduction)
    return lambda output, target: F.mse_loss(output, target, reduction=reduction)
