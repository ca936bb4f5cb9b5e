"""What a run will look like before it runs: which layers where, which schedule, how much waiting. Pure arithmetic on a
config.

Costs are those of the layer descriptions (FLOPs), in units of the forward of an average stage: stages of equal cost
have F = 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mpipipe.config import Config
from mpipipe.partition import LayerDescription, Partition, describe_gpt2, make_partition
from mpipipe.schedule import Costs, ScheduleTable, Simulation, build, formulas, simulate
from mpipipe.units import counted

ENOUGH_MICROBATCHES_PER_RANK = 4
"""With four microbatches a rank and one chunk, at most a fifth of the time is spent waiting."""


@dataclass(frozen=True)
class PlanReport:
    """A config on a number of ranks. ``str()`` gives the text of ``mpipipe plan``, ``figures()`` its JSON object.

    ``partition``: the layers of every stage. ``costs``: F, I and W per stage, in forwards of an average stage.
    ``makespan`` and ``lower_bound``: predicted length of the compute part of a step, and the least that these stages
    allow, in the same unit, messages taken as free. ``bubble_fraction``: idle time over (ranks times makespan), uneven
    stages included. ``peak_activations``: most microbatches (of one chunk) kept at once on each rank. ``advice``: what
    to change, in configuration keys; empty if there is nothing.
    """

    schedule: str
    num_ranks: int
    chunks_per_rank: int
    num_microbatches: int
    partition: Partition
    costs: Costs
    placement: tuple[int, ...]
    makespan: float
    lower_bound: float
    bubble_fraction: float
    peak_activations: tuple[int, ...]
    advice: tuple[str, ...]

    def figures(self) -> dict[str, Any]:
        """Plain numbers, lists and text, ready for ``json.dumps``; ``stages`` has one entry a stage."""
        total = math.fsum(self.partition.costs)
        stages = [
            {
                "stage": stage,
                "rank": self.placement[stage],
                "layers": [self.partition.names[layer] for layer in self.partition.layers_of(stage)],
                "cost_share": self.partition.costs[stage] / total,
            }
            for stage in range(self.partition.num_stages)
        ]
        return {
            "schedule": self.schedule,
            "ranks": self.num_ranks,
            "chunks": self.chunks_per_rank,
            "microbatches": self.num_microbatches,
            "partition": list(self.partition.sizes),
            "stages": stages,
            "makespan": self.makespan,
            "lower_bound": self.lower_bound,
            "bubble_fraction": self.bubble_fraction,
            "peak_activations": list(self.peak_activations),
            "advice": list(self.advice),
        }

    def __str__(self) -> str:
        peaks = " ".join(str(peak) for peak in self.peak_activations)
        lines = [
            f"schedule {self.schedule}: {counted(self.num_ranks, 'rank')}, {counted(self.chunks_per_rank, 'chunk')} "
            f"a rank, {counted(self.num_microbatches, 'microbatch', 'es')} a step",
            str(self.partition),
            f"the same as a list: pipeline.partition = {list(self.partition.sizes)}",
            f"predicted: makespan {self.makespan:.4g} forwards of an average stage (at least {self.lower_bound:.4g}), "
            f"bubble fraction {self.bubble_fraction:.3f}",
            f"activations kept at once, in microbatches of one chunk, by rank: {peaks}",
        ]
        return "\n".join(lines + [f"advice: {line}" for line in self.advice])


def plan(config: Config, num_ranks: int) -> PlanReport:
    """What ``config`` does on ``num_ranks`` pipeline ranks (``pipeline.ranks`` of the config is not looked at).

    Raises PartitionError if the model can't be cut for that many, ScheduleError for a schedule that is unknown or does
    not take the chunks.
    """
    chunks = config.pipeline.chunks
    table = build(config.pipeline.schedule, p=num_ranks, v=chunks, m=config.num_microbatches)
    descriptions = describe_gpt2(config.needed_model())
    partition = make_partition(descriptions, table.num_stages, config.pipeline.partition, ranks=num_ranks)
    costs = relative_costs(descriptions, partition)
    return _report(table, partition, costs, simulate(table, costs))


def relative_costs(descriptions: list[LayerDescription], partition: Partition) -> Costs:
    """F, I and W of every stage in forwards of an average stage; I and W are half the backward each."""
    stages = [descriptions[start:stop] for start, stop in partition.bounds]
    forward = [math.fsum(layer.flops_forward for layer in stage) for stage in stages]
    half = [math.fsum(layer.flops_backward for layer in stage) / 2 for stage in stages]
    unit = math.fsum(forward) / len(stages) or 1.0
    halves = [flops / unit for flops in half]
    return Costs(F=[flops / unit for flops in forward], I=halves, W=halves)


def _report(table: ScheduleTable, partition: Partition, costs: Costs, simulation: Simulation) -> PlanReport:
    return PlanReport(
        schedule=table.name,
        num_ranks=table.p,
        chunks_per_rank=table.v,
        num_microbatches=table.m,
        partition=partition,
        costs=costs,
        placement=table.placement,
        makespan=simulation.makespan,
        lower_bound=simulation.lower_bound,
        bubble_fraction=simulation.bubble_fraction,
        peak_activations=tuple(simulation.peak_activations.tolist()),
        advice=tuple(advice(table.p, table.v, table.m, table.name)),
    )


def advice(num_ranks: int, chunks_per_rank: int, num_microbatches: int, schedule: str) -> list[str]:
    """What to change for less waiting, in configuration keys, from the formulas for stages of equal cost; empty if
    nothing.

    Speaks up when there are fewer than four microbatches a rank, with the bubble fraction now and at four, and for
    ``naive``.
    """
    if num_ranks == 1:
        return []
    now = formulas.bubble_fraction(schedule, num_ranks, chunks_per_rank, num_microbatches)
    if schedule == "naive":
        better = "1f1b" if chunks_per_rank == 1 else "interleaved"
        then = formulas.bubble_fraction(better, num_ranks, chunks_per_rank, num_microbatches)
        return [
            f"pipeline.schedule = 'naive' has a bubble fraction of {now:.3f} whatever the batch: "
            f"pipeline.schedule = '{better}' has {then:.3f}"
        ]
    enough = ENOUGH_MICROBATCHES_PER_RANK * num_ranks
    if num_microbatches >= enough:
        return []
    then = formulas.bubble_fraction(schedule, num_ranks, chunks_per_rank, enough)
    found = f"{counted(num_microbatches, 'microbatch', 'es')} on {num_ranks} ranks"
    return [
        f"{found} {'is' if num_microbatches == 1 else 'are'} few: for equal stages the bubble fraction is "
        f"{now:.3f}, with {enough} microbatches (4 a rank) {then:.3f}; raise batch.sequences or lower batch.microbatch"
    ]
