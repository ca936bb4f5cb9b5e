"""Trains a model that is split by depth over the ranks of a job."""

from __future__ import annotations

from mpipipe.trainer.report import StepReport
from mpipipe.trainer.run import TrainOutcome, eval_run, train_run
from mpipipe.trainer.trainer import Trainer

__all__ = ["StepReport", "TrainOutcome", "Trainer", "eval_run", "train_run"]
