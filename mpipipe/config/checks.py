"""Checks over several keys of a run file that each are fine alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpipipe.config.explain import shown
from mpipipe.config.later import refused
from mpipipe.config.sections import MAX_MICROBATCHES
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
    if config.num_microbatches > MAX_MICROBATCHES:
        yield ConfigError(
            f"{batch.sequences} sequences in microbatches of batch.microbatch = {batch.microbatch} are "
            f"{config.num_microbatches} microbatches, more than {MAX_MICROBATCHES}: "
            "lower batch.sequences, or raise batch.microbatch",
            key="batch.sequences",
            value=batch.sequences,
            allowed=f"at most {MAX_MICROBATCHES * batch.microbatch}",
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
            f"{shown(config.lr.min_lr)} is above the highest learning rate "
            f"(optimizer.lr = {shown(config.optimizer.lr)})",
            key="lr.min_lr",
            value=config.lr.min_lr,
            allowed=f"at most {shown(config.optimizer.lr)}",
        )
    if config.eval.every_steps and not config.data.validation:
        yield ConfigError(
            f"evaluation every {counted(config.eval.every_steps, 'step')} needs validation tokens: "
            "set data.validation, or eval.every_steps = 0",
            key="eval.every_steps",
            value=config.eval.every_steps,
        )
    yield from _without_effect(config)
    trace = config.trace
    if trace.last_step is not None and trace.last_step < trace.first_step:
        yield ConfigError(
            f"step {trace.last_step} lies before trace.first_step = {trace.first_step}",
            key="trace.last_step",
            value=trace.last_step,
            allowed=f"at least {trace.first_step}",
        )


def _without_effect(config: Config) -> Iterator[ConfigError]:
    """Keys that would be ignored in silence because of what another key says."""
    if config.lr.min_lr and config.lr.schedule == "constant":
        yield ConfigError(
            f'{shown(config.lr.min_lr)} is never reached with lr.schedule = "constant": '
            'set lr.schedule = "linear" or "cosine", or lr.min_lr = 0',
            key="lr.min_lr",
            value=config.lr.min_lr,
        )
    if config.comm.path == "cuda-aware" and config.comm.device == "cpu":
        yield ConfigError(
            'with comm.device = "cpu" no message leaves a GPU: set comm.device = "cuda", or comm.path = "auto"',
            key="comm.path",
            value=config.comm.path,
        )
    keep = config.checkpoint
    if keep.keep_every and not keep.keep_last:
        yield ConfigError(
            f"{keep.keep_every} says what is kept besides the newest ones, and checkpoint.keep_last = 0 keeps all: "
            "set checkpoint.keep_last to at least 1, or checkpoint.keep_every = 0",
            key="checkpoint.keep_every",
            value=keep.keep_every,
        )
    if config.trace.enabled and config.trace.first_step > config.run.steps:
        yield ConfigError(
            f"step {config.trace.first_step} lies behind the run's last one (run.steps = {config.run.steps}), so "
            "nothing would be recorded: set an earlier one, or trace.enabled = false",
            key="trace.first_step",
            value=config.trace.first_step,
            allowed=f"at most {config.run.steps}",
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
            allowed=f"a list that adds up to {layers}, or model.layers = {sum(partition)}",
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
            allowed=f"a list of ranks times {chunks} numbers",
        )
