"""One stage of the model on its owner: computes, and knows neither peers nor schedules."""

from __future__ import annotations

from mpipipe.stage.activation import Activation
from mpipipe.stage.gradients import Gradient, clear_all
from mpipipe.stage.key import MicrobatchKey
from mpipipe.stage.layer import StageLayer
from mpipipe.stage.nested import Nested, Spec, map_tensors, tensors_of
from mpipipe.stage.stage import Gradients, LossFunction, Stage, whole_count

__all__ = [
    "Activation",
    "Gradient",
    "Gradients",
    "LossFunction",
    "MicrobatchKey",
    "Nested",
    "Spec",
    "Stage",
    "StageLayer",
    "clear_all",
    "map_tensors",
    "tensors_of",
    "whole_count",
]
