"""Cutting a list of layers into contiguous stages. Every layer lies on exactly one stage, whatever the numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mpipipe.errors import PartitionError
from mpipipe.partition.layers import LayerDescription
from mpipipe.units import counted

Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Partition:
    """Contiguous stages over the complete layer list.

    ``bounds``: (start, stop) layer indices of each stage, in order; together they cover ``range(num_layers)`` once.
    ``sizes``: counted layers of each stage (without embedding and head). ``names``: all layers. ``costs``: FLOPs (or
    the user's unit) of each stage.
    """

    bounds: Bounds
    sizes: tuple[int, ...]
    names: tuple[str, ...]
    costs: tuple[float, ...]

    @property
    def num_stages(self) -> int:
        return len(self.bounds)

    @property
    def num_layers(self) -> int:
        return len(self.names)

    def layers_of(self, stage: int) -> range:
        """Indices of the layers of a stage."""
        return range(*self.bounds[stage])

    def __str__(self) -> str:
        """One line a stage: its layers and its share of the cost."""
        total = math.fsum(self.costs) or 1.0
        lines = []
        for stage, (start, stop) in enumerate(self.bounds):
            first, last = self.names[start], self.names[stop - 1]
            span = f"layer {first}" if stop - start == 1 else f"layers {first} .. {last}"
            lines.append(f"stage {stage}: {span}, {self.costs[stage] / total:.1%} of the cost")
        return "\n".join(lines)


def split_even(num_layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage, sizes that differ by at most one, the larger ones first: 48 on 4 -> (12, 12, 12, 12); 10 on 4
    -> (3, 3, 2, 2).
    """
    _check_count(num_layers, stages, None)
    small, extra = divmod(num_layers, stages)
    return tuple(small + 1 if stage < extra else small for stage in range(stages))


def split_listed(num_layers: int, sizes: Sequence[int], stages: int | None = None) -> tuple[int, ...]:
    """The user's own layers per stage, checked: one entry a stage, each at least 1, together ``num_layers``."""
    listed = list(sizes)
    shown = f"pipeline.partition = {listed}"
    if stages is not None and len(listed) != stages:
        raise PartitionError(
            f"{shown} is a list of {len(listed)}, but pipeline.ranks times pipeline.chunks is {stages}",
            key="pipeline.partition",
            value=listed,
            allowed=f"a list of {stages} that sums to {num_layers}",
        )
    if any(size < 1 for size in listed):
        raise PartitionError(
            f"{shown} leaves stage {next(i for i, size in enumerate(listed) if size < 1)} without a layer",
            key="pipeline.partition",
            value=listed,
            allowed="at least 1 layer a stage",
        )
    if sum(listed) != num_layers:
        raise PartitionError(
            f"{shown} sums to {sum(listed)}, but model.layers is {num_layers} (embedding and head do not count)",
            key="pipeline.partition",
            value=listed,
            allowed=f"a list of {len(listed)} that sums to {num_layers}",
        )
    return tuple(listed)


def split_by_cost(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Layers per stage, contiguous, with the smallest possible cost of the dearest stage; every stage has at least
    one layer.

    Exact: a dynamic programme over prefixes, O(stages * n^2) in numpy. Among the cuts with that smallest maximum the
    one with the smallest sum of squared stage costs is taken, and among those the one with the larger stages first.
    With all costs zero: ``split_even``.
    """
    _check_count(len(costs), stages, None)
    for index, cost in enumerate(costs):
        if not math.isfinite(cost) or cost < 0:
            raise PartitionError(
                f"the cost of layer {index} is {cost}", key="pipeline.partition", allowed="finite, at least 0"
            )
    if not any(costs):
        return split_even(len(costs), stages)
    spans = _interval_costs(costs)
    best, _ = _cut(spans, stages, maximum=True)
    scaled = np.where(spans <= best, spans / best, np.inf)
    squares = np.rint(scaled**2 * 2**40)  # whole numbers: their sums are exact, and ties are ties
    _, sizes = _cut(squares, stages, maximum=False)
    return sizes


def _interval_costs(costs: Sequence[float]) -> npt.NDArray[np.float64]:
    """(n+1, n+1): the cost of the layers i..j-1 at [i, j], rounded once (so that equal layers have equal sums); inf
    where j <= i. Differences of prefix sums, which are whole numbers in units of the finest bit of all costs.
    """
    n = len(costs)
    ratios = [float(cost).as_integer_ratio() for cost in costs]
    unit = max(below for _, below in ratios)
    prefix = [0]
    for above, below in ratios:
        prefix.append(prefix[-1] + above * (unit // below))
    spans = np.full((n + 1, n + 1), np.inf)
    for i in range(n):
        spans[i, i + 1 :] = [(total - prefix[i]) / unit for total in prefix[i + 1 :]]
    return spans


def _cut(spans: npt.NDArray[np.float64], stages: int, *, maximum: bool) -> tuple[float, tuple[int, ...]]:
    """Best total (the largest or the sum of the stages' entries) of a cut of all layers, and the layers of each
    stage.
    """
    n = spans.shape[0] - 1
    total = spans[0].copy()  # best of one stage over the first j layers
    choices: list[npt.NDArray[np.intp]] = []
    for _ in range(stages - 1):
        table = np.maximum(total[:, None], spans) if maximum else total[:, None] + spans
        from_end = np.argmin(table[::-1], axis=0)  # of equals the latest cut: the earlier stages are the larger ones
        choices.append(n - from_end)
        total = table[choices[-1], np.arange(n + 1)]
    cuts = [n]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    cuts.append(0)
    cuts.reverse()
    return float(total[n]), tuple(stop - start for start, stop in pairwise(cuts))


def make_partition(
    descriptions: Sequence[LayerDescription], stages: int, how: str | Sequence[int], *, ranks: int | None = None
) -> Partition:
    """Cut the layers into ``stages`` = ranks times chunks contiguous stages.

    ``how``: ``"even"``, ``"cost"`` (FLOPs forward and backward) or a list of counted layers per stage. A layer that
    does not count goes with the counted layer before it, or with the first one. ``ranks`` only serves the error
    message. Raises PartitionError.
    """
    counting = [index for index, layer in enumerate(descriptions) if layer.counted]
    _check_count(len(counting), stages, ranks, others=len(counting) < len(descriptions))
    starts = [0, *counting[1:]]  # layer index at which the group of each counted layer starts
    stops = [*starts[1:], len(descriptions)]
    if how == "even":
        sizes = split_even(len(counting), stages)
    elif how == "cost":
        groups = [math.fsum(x.flops for x in descriptions[i:j]) for i, j in zip(starts, stops, strict=True)]
        sizes = split_by_cost(groups, stages)
    elif isinstance(how, str):
        raise PartitionError(
            f"{how!r} is not a partition",
            key="pipeline.partition",
            value=how,
            allowed='"cost", "even" or a list of layers per stage',
        )
    else:
        sizes = split_listed(len(counting), how, stages)
    ends = np.cumsum(sizes)
    bounds = tuple((starts[int(end) - size], stops[int(end) - 1]) for end, size in zip(ends, sizes, strict=True))
    return Partition(
        bounds=bounds,
        sizes=sizes,
        names=tuple(layer.name for layer in descriptions),
        costs=tuple(math.fsum(x.flops for x in descriptions[i:j]) for i, j in bounds),
    )


def _check_count(num_layers: int, stages: int, ranks: int | None, *, others: bool = False) -> None:
    """Refuse no stage, no layer, and more stages than layers. ``others``: the model has layers that do not count."""
    if stages < 1:
        raise PartitionError(f"{stages} stages asked for", key="pipeline.ranks", value=stages, allowed="at least 1")
    if num_layers >= stages:
        return
    what = f"{counted(stages, 'stage')} for {counted(num_layers, 'layer')}"
    what += "; embedding and head do not count" if others else ""
    facts: dict[str, Any]
    if ranks is None:
        facts = {"key": "pipeline.chunks", "allowed": f"pipeline.ranks times pipeline.chunks at most {num_layers}"}
    elif ranks > num_layers:
        what = f"pipeline.ranks = {ranks} is too many: {what}"
        facts = {
            "key": "pipeline.ranks",
            "value": ranks,
            "allowed": f"at most {counted(num_layers, 'rank')}, or a model with more layers",
        }
    else:
        chunks = stages // ranks
        what = f"pipeline.chunks = {chunks} times pipeline.ranks = {ranks} makes {what}"
        largest = f"at most {num_layers // ranks} with {counted(ranks, 'rank')}"
        facts = {"key": "pipeline.chunks", "value": chunks, "allowed": largest}
    raise PartitionError(what, **facts)
