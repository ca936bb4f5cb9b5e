"""The run file: one TOML file a run, read into frozen sections; every key is checked, errors are in the user's keys."""

from __future__ import annotations

from mpipipe.config.explain import joined
from mpipipe.config.run_file import Config, unknown_schedule
from mpipipe.config.sections import (
    BatchSection,
    CheckpointSection,
    CommSection,
    DataSection,
    EvalSection,
    LogSection,
    LrSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    PrecisionSection,
    RunSection,
    Section,
    TraceSection,
    is_path,
)

__all__ = [
    "BatchSection",
    "CheckpointSection",
    "CommSection",
    "Config",
    "DataSection",
    "EvalSection",
    "LogSection",
    "LrSection",
    "ModelSection",
    "OptimizerSection",
    "PipelineSection",
    "PrecisionSection",
    "RunSection",
    "Section",
    "TraceSection",
    "is_path",
    "joined",
    "unknown_schedule",
]
