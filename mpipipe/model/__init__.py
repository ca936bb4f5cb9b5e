"""Torch layers: the GPT-2 family as a list of layer factories, keyed initial weights, keyed dropout, and the token
loss.
"""

from mpipipe.model.draw import Draw, KeyedLayer, stable_key
from mpipipe.model.gpt2 import Attention, Block, Embedding, Head, Mlp, ModelLayers, gpt2_layers
from mpipipe.model.initial import fill_parameters
from mpipipe.model.linear import Use, WeightSink, defer_linear, linear, weight_gradients
from mpipipe.model.loss import IGNORED_LABEL, token_loss

__all__ = [
    "IGNORED_LABEL",
    "Attention",
    "Block",
    "Draw",
    "Embedding",
    "Head",
    "KeyedLayer",
    "Mlp",
    "ModelLayers",
    "Use",
    "WeightSink",
    "defer_linear",
    "fill_parameters",
    "gpt2_layers",
    "linear",
    "stable_key",
    "token_loss",
    "weight_gradients",
]
