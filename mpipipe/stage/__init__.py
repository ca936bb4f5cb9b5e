"""One stage of the model on its owner: computes, and knows neither peers nor schedules."""

from __future__ import annotations

from mpipipe.stage.gradients import Gradient
from mpipipe.stage.layer import StageLayer
from mpipipe.stage.stage import LossFunction, MicrobatchKey, Stage

__all__ = ["Gradient", "LossFunction", "MicrobatchKey", "Stage", "StageLayer"]
