"""Receives against their sends: after clock correction no message may arrive before it was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mpipipe.formats.trace import FLAG_GRADIENT, FLAG_LOCAL, EventKind
from mpipipe.schedule import ScheduleTable


class _Rank(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def clock_error_ns(self) -> float: ...
    @property
    def events(self) -> npt.NDArray[np.void]: ...


def count_causality_violations(
    ranks: Mapping[int, _Rank], steps: Sequence[int], tables: Mapping[int, ScheduleTable], p: int
) -> tuple[int, int]:
    """(receives that end before their send began by more than both clocks' error, receives matched with a send).

    A message is known by what it is: step, sending and receiving rank, kind (activation or gradient), receiving stage
    and microbatch. The stages come from the events' table rows.
    """
    sent: dict[tuple[int, ...], int] = {}
    for rank, one in ranks.items():
        events = _of_kind(one, EventKind.SEND_POST, steps)
        stages = _stages(events, one.position, tables) + np.where(events["flags"] & FLAG_GRADIENT, -1, 1)
        for key, t0 in zip(_keys(events, stages, rank, sending=True), events["t0_ns"].tolist(), strict=True):
            sent.setdefault(key, t0)
    late = matched = 0
    for rank, one in ranks.items():
        events = _of_kind(one, EventKind.RECV_WAIT, steps)
        stages = _stages(events, one.position, tables)
        for key, t1 in zip(_keys(events, stages, rank, sending=False), events["t1_ns"].tolist(), strict=True):
            begun = sent.get(key)
            if begun is not None:
                matched += 1
                late += t1 < begun - one.clock_error_ns - ranks[key[1]].clock_error_ns
    return late, matched


def _of_kind(one: _Rank, kind: EventKind, steps: Sequence[int]) -> npt.NDArray[np.void]:
    events = one.events
    wanted = (events["kind"] == kind) & (events["flags"] & FLAG_LOCAL == 0)
    found: npt.NDArray[np.void] = events[wanted & np.isin(events["step"], np.asarray(steps, np.int64))]
    return found


def _stages(
    events: npt.NDArray[np.void], position: int, tables: Mapping[int, ScheduleTable]
) -> npt.NDArray[np.int64]:
    """The stage of each event's compute action: from its table row; the event's own where it has none."""
    stages = events["stage"].astype(np.int64)
    for key in np.unique(events["table"]).tolist():
        if key in tables:
            of_rank = tables[key].stages[tables[key].row_of(position)]
            known = (events["table"] == key) & (events["row"] >= 0) & (events["row"] < len(of_rank))
            stages[known] = of_rank[events["row"][known]]
    return stages


def _keys(
    events: npt.NDArray[np.void], stages: npt.NDArray[np.int64], rank: int, sending: bool
) -> list[tuple[int, ...]]:
    """(step, sender, receiver, gradient, receiving stage, microbatch) of each event."""
    here = np.full(len(events), rank)
    sender, receiver = (here, events["peer"]) if sending else (events["peer"], here)
    gradient = events["flags"] & FLAG_GRADIENT
    columns = (events["step"], sender, receiver, gradient, stages, events["microbatch"])
    return list(zip(*(column.tolist() for column in columns), strict=True))
