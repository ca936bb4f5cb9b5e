"""What a run will look like before it runs: which layers where, which schedule, how much waiting. Pure arithmetic on a
config.

Costs are those of the layer descriptions (FLOPs), in units of the forward of an average stage: stages of equal cost
have F = 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpipipe.config import Config
from mpipipe.errors import ScheduleError
from mpipipe.partition import LayerDescription, Partition, describe_gpt2, make_partition
from mpipipe.schedule import Costs, ScheduleTable, Simulation, fewer_microbatches, formulas, simulate
from mpipipe.schedule.exchange import is_file, table_named
from mpipipe.schedule.search import SearchResult, search
from mpipipe.units import counted

ENOUGH_MICROBATCHES_PER_RANK = 4
"""With four microbatches a rank and one chunk, at most a fifth of the time is spent waiting."""

AUTO = "auto"
"""The value of ``pipeline.schedule`` that lets the planner choose."""

COST_UNITS = 1000
"""The whole-number unit of ``choose_schedule``: the forward of an average stage has this cost."""


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
    descriptions = describe_gpt2(config.needed_model())
    stages = num_ranks * config.pipeline.chunks
    partition = make_partition(descriptions, stages, config.pipeline.partition, ranks=num_ranks)
    costs = relative_costs(descriptions, partition)
    table = schedule_table(config, num_ranks, config.num_microbatches, descriptions)
    return _report(table, partition, costs, simulate(table, costs))


def schedule_table(
    config: Config, num_ranks: int, num_microbatches: int, descriptions: Sequence[LayerDescription]
) -> ScheduleTable:
    """The table of ``pipeline.schedule``: of a family, of a file, or for "auto" the one that ``choose_schedule`` finds
    for the layers' costs. The same on every rank.

    With fewer microbatches than the config's (the last batch of an epoch), "auto", a file, and a family that does not
    take so few keep their table and leave the others out. Raises ScheduleError, PartitionError.
    """
    pipeline = config.pipeline
    if pipeline.schedule != AUTO:
        try:
            return table_named(pipeline.schedule, p=num_ranks, v=pipeline.chunks, m=num_microbatches)
        except ScheduleError:  # a file, or a family that needs more: the rest of the batch is left out
            if num_microbatches >= config.num_microbatches:
                raise
    if num_microbatches < config.num_microbatches:
        whole = schedule_table(config, num_ranks, config.num_microbatches, descriptions)
        return fewer_microbatches(whole, num_microbatches)
    stages = num_ranks * pipeline.chunks
    partition = make_partition(descriptions, stages, pipeline.partition, ranks=num_ranks)
    return choose_schedule(
        relative_costs(descriptions, partition),
        num_ranks=num_ranks,
        chunks_per_rank=pipeline.chunks,
        num_microbatches=num_microbatches,
    ).table


def relative_costs(descriptions: Sequence[LayerDescription], partition: Partition) -> Costs:
    """F, I and W of every stage in forwards of an average stage; I and W are half the backward each."""
    stages = [descriptions[start:stop] for start, stop in partition.bounds]
    forward = [math.fsum(layer.flops_forward for layer in stage) for stage in stages]
    half = [math.fsum(layer.flops_backward for layer in stage) / 2 for stage in stages]
    unit = math.fsum(forward) / len(stages) or 1.0
    halves = [flops / unit for flops in half]
    return Costs(F=[flops / unit for flops in forward], I=halves, W=halves)


def choose_schedule(
    costs: Costs,
    *,
    num_ranks: int,
    chunks_per_rank: int,
    num_microbatches: int,
    cap: int | Sequence[int] | None = None,
    split: bool = True,
    effort: int = 0,
) -> SearchResult:
    """The table of ``pipeline.schedule = "auto"`` for ``costs`` as ``relative_costs`` gives them.

    Ordered, with one copy of every stage, so that it can be executed and the bit contract holds. ``cap``: most chunk
    activations of a rank, one number or one a rank; None: as many as make no rank wait, of which the choice keeps the
    fewest that the shortest table needs. ``split``: whether the backward may be split. ``effort``: of the local
    search; 0 for none, so that a start takes no time for it. The same on every rank and
    machine: costs are rounded to thousandths of a forward of an average stage and taken as whole numbers, so that no
    sum depends on its order. ``simulation`` and ``lower_bound`` of the result are in these thousandths. Raises
    ScheduleError.
    """
    stages = num_ranks * chunks_per_rank
    forward, _, input_gradient, weight = (row.tolist() for row in costs.per_stage(stages))
    whole = Costs(
        F=[float(round(COST_UNITS * cost)) for cost in forward],
        I=[float(round(COST_UNITS * cost)) for cost in input_gradient],
        W=[float(round(COST_UNITS * cost)) for cost in weight],
    )
    return search(p=num_ranks, v=chunks_per_rank, m=num_microbatches, costs=whole, cap=cap, split=split, effort=effort)


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
    if num_ranks == 1 or schedule == AUTO or is_file(schedule):
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
