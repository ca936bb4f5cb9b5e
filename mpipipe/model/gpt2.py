"""The GPT-2 family: embedding, pre-norm blocks, head, as a list of layers of one tensor in and one tensor out.

Shape suffixes: B microbatch, S sequence, H hidden, N heads, D hidden per head, F hidden of the MLP, V vocabulary.

Every layer returns a contiguous tensor. Dropout, where asked for, acts on the embeddings and on what attention and
MLP add to the residual stream; the attention probabilities have none (they are never stored).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpipipe.errors import ConfigError
from mpipipe.model.draw import Draw, KeyedLayer
from mpipipe.model.initial import fill_parameters
from mpipipe.model.linear import WeightSink, linear
from mpipipe.partition import LayerDescription, ModelShape, describe_gpt2

TIED = ("embedding.tokens.weight", "head.weight")


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer with unset weights: no draw from torch's global generator."""
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
    assert isinstance(layer, nn.Linear)
    return layer


def _table(rows: int, width: int) -> nn.Embedding:
    layer = nn.utils.skip_init(nn.Embedding, rows, width)
    assert isinstance(layer, nn.Embedding)
    return layer


def _residual_dropout(x: Tensor, draw: Draw | None, rate: float, name: str) -> Tensor:
    return x if draw is None or rate == 0.0 else draw.dropout(x, rate, name)


class Embedding(KeyedLayer):
    """Token ids (microbatch, sequence) int64 -> (microbatch, sequence, hidden): token plus learned position."""

    def __init__(self, name: str, vocab: int, sequence: int, hidden: int, dropout: float) -> None:
        super().__init__(name)
        self.tokens = _table(vocab, hidden)
        self.positions = _table(sequence, hidden)
        self.dropout = dropout

    def forward(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        """Raises ConfigError where the sequence is longer than model.sequence."""
        length, longest = x.shape[1], self.positions.num_embeddings
        if length > longest:
            raise ConfigError(
                f"a sequence of {length} tokens", key="model.sequence", value=longest, allowed=f"at least {length}"
            )
        x_BSH = self.tokens(x) + self.positions.weight[:length]
        return _residual_dropout(x_BSH, draw, self.dropout, f"{self.layer_name}.sum")


class Attention(nn.Module):
    """Causal self-attention with biases, (microbatch, sequence, hidden) to the same."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.qkv = _linear(hidden, 3 * hidden)
        self.out = _linear(hidden, hidden)
        self.heads = heads

    def forward(self, x_BSH: Tensor) -> Tensor:
        B, S, H = x_BSH.shape
        qkv_BS3ND = self.qkv(x_BSH).view(B, S, 3, self.heads, H // self.heads)
        q_BNSD, k_BNSD, v_BNSD = qkv_BS3ND.permute(2, 0, 3, 1, 4)
        mixed_BNSD = F.scaled_dot_product_attention(q_BNSD, k_BNSD, v_BNSD, is_causal=True)
        output_BSH: Tensor = self.out(mixed_BNSD.transpose(1, 2).reshape(B, S, H))
        return output_BSH


class Mlp(nn.Module):
    """Up, GELU (tanh form), down, with biases."""

    def __init__(self, hidden: int, ffn_hidden: int) -> None:
        super().__init__()
        self.up = _linear(hidden, ffn_hidden)
        self.down = _linear(ffn_hidden, hidden)

    def forward(self, x_BSH: Tensor) -> Tensor:
        output_BSH: Tensor = self.down(F.gelu(self.up(x_BSH), approximate="tanh"))
        return output_BSH


class Block(KeyedLayer):
    """One pre-norm decoder block, (microbatch, sequence, hidden) to the same."""

    def __init__(self, name: str, hidden: int, heads: int, ffn_hidden: int, dropout: float, norm_eps: float) -> None:
        super().__init__(name)
        self.norm1 = nn.LayerNorm(hidden, eps=norm_eps)
        self.attention = Attention(hidden, heads)
        self.norm2 = nn.LayerNorm(hidden, eps=norm_eps)
        self.mlp = Mlp(hidden, ffn_hidden)
        self.dropout = dropout

    def forward(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        added_BSH = _residual_dropout(self.attention(self.norm1(x)), draw, self.dropout, f"{self.layer_name}.attention")
        x_BSH = x + added_BSH
        added_BSH = _residual_dropout(self.mlp(self.norm2(x_BSH)), draw, self.dropout, f"{self.layer_name}.mlp")
        return x_BSH + added_BSH


class Head(KeyedLayer):
    """Final norm and the product with the vocabulary, no bias: (microbatch, sequence, hidden) -> (microbatch,
    sequence, vocab).
    """

    def __init__(self, name: str, vocab: int, hidden: int, norm_eps: float) -> None:
        super().__init__(name)
        self.weight = nn.Parameter(torch.empty(vocab, hidden))
        self.norm = nn.LayerNorm(hidden, eps=norm_eps)
        self.weight_sink: WeightSink | None = None

    def forward(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        return linear(self.norm(x), self.weight, None, self.weight_sink)


@dataclass(frozen=True)
class ModelLayers:
    """A model as layers that anyone may build alone: ``factories[i]()`` makes layer ``names[i]``, a float32 module on
    the CPU.

    ``tied``: (primary, copy) pairs of global parameter names that are one weight; both come out with the primary's
    initial values.
    """

    factories: list[Callable[[], nn.Module]]
    names: list[str]
    descriptions: list[LayerDescription]
    tied: list[tuple[str, str]] = field(default_factory=list)


def gpt2_layers(model: ModelShape, seed: int) -> ModelLayers:
    """The layers of a GPT-2 style decoder. The initial weights depend on ``seed`` and the parameter's name only.

    Raises ConfigError for another family, for hidden that does not divide by heads, and for a dropout outside [0, 1).
    """
    if model.family != "gpt2":
        raise ConfigError("this family can't be built", key="model.family", value=model.family, allowed=["gpt2"])
    if not 0.0 <= model.dropout < 1.0:
        raise ConfigError(
            f"{model.dropout} is no rate", key="model.dropout", value=model.dropout, allowed="at least 0 and below 1"
        )
    descriptions = describe_gpt2(model)
    names = [layer.name for layer in descriptions]
    tied = [TIED] if model.tie_embeddings else []
    primary = {copy: first for first, copy in tied}
    ffn_hidden = model.ffn_hidden or 4 * model.hidden
    makers: list[Callable[[], nn.Module]] = [
        partial(Embedding, names[0], model.vocab, model.sequence, model.hidden, model.dropout),
        *(
            partial(Block, name, model.hidden, model.heads, ffn_hidden, model.dropout, model.norm_eps)
            for name in names[1:-1]
        ),
        partial(Head, names[-1], model.vocab, model.hidden, model.norm_eps),
    ]

    def build(maker: Callable[[], nn.Module], name: str) -> nn.Module:
        layer = maker()
        fill_parameters(layer, name, seed, model.layers, primary)
        return layer

    factories = [partial(build, maker, name) for maker, name in zip(makers, names, strict=True)]
    return ModelLayers(list(factories), names, descriptions, tied)
