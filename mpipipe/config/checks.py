"""Checks over several keys of a run file that each are fine alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpipipe.config.explain import shown
from mpipipe.config.later import refused
from mpipipe.errors import ConfigError, PartitionError
from mpipipe.units import counted

if TYPE_CHECKING:
    from mpipipe.config.run_file import Config
    from mpipipe.config.sections import ModelSection


def problems(config: Config) -> Iterator[ConfigError]:
    """Every contradiction in a config; the errors' ``file`` is not filled in."""
    sections = {name: dict(getattr(config, name) or {}) for name in type(config).model_fields}
    for key, value, only in refused(sections):
        yield ConfigError(f"this version does not have {shown(value)} yet", key=key, value=value, allowed=only)
    yield from _batch_and_steps(config)
    if config.model is not None:
        yield from _model(config.model)
        yield from _split(config, config.model.layers)


def _model(model: ModelSection) -> Iterator[ConfigError]:
    if model.hidden % model.heads:
        yield ConfigError(
            f"{model.heads} heads do not divide model.hidden = {model.hidden}",
            key="model.heads",
            value=model.heads,
            allowed=f"a divisor of {model.hidden}",
        )


def _batch_and_steps(config: Config) -> Iterator[ConfigError]:
    batch, steps = config.batch, config.run.steps
    if batch.microbatch > batch.sequences:
        yield ConfigError(
            f"a microbatch of {batch.microbatch} sequences is larger than batch.sequences = {batch.sequences}",
            key="batch.microbatch",
            value=batch.microbatch,
            allowed=f"at most {batch.sequences}",
        )
    if config.lr.warmup_steps > steps:
        yield ConfigError(
            f"a warm-up of {counted(config.lr.warmup_steps, 'step')} is longer than the run (run.steps = {steps})",
            key="lr.warmup_steps",
            value=config.lr.warmup_steps,
            allowed=f"at most {steps}",
        )
    if config.lr.min_lr > config.optimizer.lr:
        yield ConfigError(
            f"{config.lr.min_lr:g} is above the highest learning rate (optimizer.lr = {config.optimizer.lr:g})",
            key="lr.min_lr",
            value=config.lr.min_lr,
            allowed=f"at most {config.optimizer.lr:g}",
        )
    if config.eval.every_steps and not config.data.validation:
        yield ConfigError(
            f"evaluation every {counted(config.eval.every_steps, 'step')} needs validation tokens: "
            "set data.validation, or eval.every_steps = 0",
            key="eval.every_steps",
            value=config.eval.every_steps,
        )
    trace = config.trace
    if trace.last_step is not None and trace.last_step < trace.first_step:
        yield ConfigError(
            f"step {trace.last_step} lies before trace.first_step = {trace.first_step}",
            key="trace.last_step",
            value=trace.last_step,
            allowed=f"at least {trace.first_step}",
        )


def _split(config: Config, layers: int) -> Iterator[ConfigError]:
    chunks, ranks = config.pipeline.chunks, config.pipeline.ranks
    partition = config.pipeline.partition
    if ranks is not None and ranks > layers:
        yield PartitionError(
            f"{ranks} ranks are more than model.layers = {layers}: every stage needs a layer",
            key="pipeline.ranks",
            value=ranks,
            allowed=f"at most {layers}",
        )
    elif ranks is not None and ranks * chunks > layers:
        yield PartitionError(
            f"{chunks} chunks a rank on {counted(ranks, 'rank')} make {ranks * chunks} stages, "
            f"more than model.layers = {layers}",
            key="pipeline.chunks",
            value=chunks,
            allowed=f"at most {layers // ranks} with {counted(ranks, 'rank')}",
        )
    elif ranks is None and chunks > layers:
        yield PartitionError(
            f"{chunks} chunks are more than model.layers = {layers}: every stage needs a layer",
            key="pipeline.chunks",
            value=chunks,
            allowed=f"at most {layers}",
        )
    if not isinstance(partition, str):
        yield from _listed_partition(partition, layers, chunks, ranks)


def _listed_partition(partition: tuple[int, ...], layers: int, chunks: int, ranks: int | None) -> Iterator[ConfigError]:
    if sum(partition) != layers:
        yield PartitionError(
            f"{shown(partition)} adds up to {sum(partition)}, and model.layers is {layers}",
            key="pipeline.partition",
            value=partition,
        )
    if ranks is not None and len(partition) != ranks * chunks:
        yield PartitionError(
            f"{shown(partition)} is a list of {len(partition)}, and "
            f"pipeline.ranks = {ranks} times pipeline.chunks = {chunks} needs one of {ranks * chunks}",
            key="pipeline.partition",
            value=partition,
            allowed=f"a list of {counted(ranks * chunks, 'number')}",
        )
    elif ranks is None and len(partition) % chunks:
        yield PartitionError(
            f"{shown(partition)} is a list of {len(partition)}, no multiple of pipeline.chunks = {chunks}",
            key="pipeline.partition",
            value=partition,
        )
