"""What the registry knows of one family of schedules. Letters: p = num_ranks, v = chunks_per_rank, m =
num_microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from mpipipe.schedule.table import ScheduleTable

Check = Callable[[int, int, int], str | None]
"""(p, v, m) -> None, or why the family does not take them and the nearest values that it takes, in configuration
keys."""


MOST_ACTIONS = 200_000_000
"""Actions of the largest table that is built, counted as F, I and W of every stage and microbatch."""


@dataclass(frozen=True)
class Option:
    """A parameter of a family, a whole number of at least ``least``, written ``NAME:option=K``.

    ``default`` says in words what holds without it.
    """

    description: str
    default: str
    least: int = 0


@dataclass(frozen=True)
class Family:
    """One family: its name, what it is for, and its generator ``generate(p, v, m, **options)``.

    ``chunks``: the only v that the family takes, None for any. ``default_chunks``: v where none is asked for.
    ``other_chunks``: the family to take for another v, in words. ``check``: what else p, v and m must fulfil.
    ``most_actions``: less than ``MOST_ACTIONS`` for a generator that would take minutes for these.
    """

    name: str
    summary: str
    generate: Callable[..., ScheduleTable]
    chunks: int | None = None
    default_chunks: int = 1
    other_chunks: str = ""
    check: Check | None = None
    most_actions: int = MOST_ACTIONS
    options: Mapping[str, Option] = field(default_factory=lambda: MappingProxyType({}))

    def refusal(self, p: int, v: int, m: int) -> str | None:
        """Why there is no table of this family for p, v, m; None if there is one."""
        if self.chunks is not None and v != self.chunks:
            one = "one chunk" if self.chunks == 1 else f"{self.chunks} chunks"
            instead = f"take pipeline.schedule = {self.other_chunks} or " if self.other_chunks else "take "
            return (
                f"pipeline.schedule = '{self.name}' has {one} per rank, pipeline.chunks = {v} was asked for: "
                f"{instead}pipeline.chunks = {self.chunks}"
            )
        if 3 * p * v * m > self.most_actions:
            return (
                f"pipeline.schedule = '{self.name}' with pipeline.ranks = {p}, pipeline.chunks = {v} and m = {m} "
                f"microbatches, from batch.sequences and batch.microbatch, has {3 * p * v * m:,} actions, counted as "
                f"F, I and W; a table of it has at most {self.most_actions:,}: take m = "
                f"{max(1, self.most_actions // (3 * p * v))} or less"
            )
        return self.check(p, v, m) if self.check is not None else None
