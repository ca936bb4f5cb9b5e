"""Our training against a loop that shares nothing with it but the initial weights: plain torch, torch's AdamW and
clip_grad_norm_.
"""

from __future__ import annotations

import math

import pytest
import tiny
import torch
from torch import nn
from torch.nn import functional

from mpipipe.model import gpt2_layers
from mpipipe.transport import run_ranks

STEPS = 20


class PlainBlock(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(width / self.heads)
        masked = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        mixed = (masked.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainModel(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, tied: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(tiny.VOCAB, hidden), nn.Embedding(tiny.SEQUENCE, hidden)
        self.blocks = nn.ModuleList(PlainBlock(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, tiny.VOCAB, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def our_name(name: str) -> str:
    """The global name of a parameter of the plain model."""
    for plain, ours in (
        ("tokens.", "embedding.tokens."),
        ("positions.", "embedding.positions."),
        ("head.weight", "head.weight"),
        ("norm.", "head.norm."),
    ):
        if name.startswith(plain):
            return ours + name[len(plain) :]
    for plain, ours in (("qkv", "attention.qkv"), ("out", "attention.out"), ("up", "mlp.up"), ("down", "mlp.down")):
        name = name.replace(f".{plain}.", f".{ours}.")
    return name


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_twenty_steps_follow_a_plain_torch_loop(tied: bool) -> None:
    config = tiny.config(model__dropout=0.0, model__tie_embeddings=tied, optimizer__clip_norm=0.5)
    initial = {}
    ours = gpt2_layers(config.model, config.run.seed)
    for factory, layer in zip(ours.factories, ours.names, strict=True):
        initial.update({f"{layer}.{key}": value for key, value in factory().state_dict().items()})

    plain = PlainModel(config.model.layers, config.model.hidden, config.model.heads, tied)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            assert parameter.shape == initial[our_name(name)].shape
            parameter.copy_(initial[our_name(name)])
    settings = config.optimizer
    matrices = [p for p in plain.parameters() if p.dim() >= 2]
    vectors = [p for p in plain.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)
    warmup, total = config.lr.warmup_steps, config.run.steps

    story = tiny.merge(run_ranks(3, lambda transport: tiny.run(config, transport, STEPS)))
    clipped = 0
    for step, (loss, norm) in enumerate(story.steps):
        inputs, targets = tiny.batch(step)
        rate = settings.lr * (step + 1) / warmup
        if step >= warmup:
            rate = settings.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - 1 - warmup)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        expected = functional.cross_entropy(plain(inputs).flatten(0, 1), targets.flatten())
        expected.backward()
        expected_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), settings.clip_norm).item()
        optimizer.step()
        clipped += expected_norm > settings.clip_norm
        assert loss == pytest.approx(expected.item(), rel=1e-5), f"step {step}"
        assert norm == pytest.approx(expected_norm, rel=1e-5), f"step {step}"
    assert clipped > STEPS // 2
