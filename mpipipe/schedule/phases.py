"""The phases of a step: warm-up, steady, cool-down. Letters: p = num_ranks, A = number of actions."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from mpipipe.schedule.action import Kind
from mpipipe.schedule.simulate import Simulation
from mpipipe.schedule.table import ScheduleTable


class Phase(IntEnum):
    """A rank is in its warm-up before its first backward, in its cool-down after its last forward."""

    WARMUP = 0
    STEADY = 1
    COOLDOWN = 2

    @property
    def title(self) -> str:
        """The word for people: ``warm-up``, ``steady``, ``cool-down``."""
        return ("warm-up", "steady", "cool-down")[self]


def action_phases(table: ScheduleTable) -> NDArray[np.uint8]:
    """The phase of each action, uint8 (A,).

    An overlapped pair is in one phase, and steady where one of its two would be. A rank without backwards, as in an
    evaluation, is steady throughout; SEND and RECV have the phase of their place.
    """
    phases = np.full(table.num_actions, Phase.STEADY, dtype=np.uint8)
    backward = (table.kinds >= Kind.B) & (table.kinds <= Kind.W)
    for rank in range(table.p):
        row = table.row_of(rank)
        backwards = np.flatnonzero(backward[row])
        if not backwards.size:
            continue
        forwards = np.flatnonzero(table.kinds[row] == Kind.F)
        phases[row.start : row.start + int(backwards[0])] = Phase.WARMUP
        after = row.start + int(forwards[-1]) + 1 if forwards.size else row.start
        phases[after : row.stop] = Phase.COOLDOWN
    phases[table.overlaps] = phases[table.overlaps + 1] = Phase.STEADY
    return phases


def phase_bounds(simulation: Simulation) -> NDArray[np.float64]:
    """When the phases of each rank begin and end, float64 (p, 4).

    Warm-up, steady and cool-down of a rank lie between neighbouring columns: 0, the start of its first backward, the
    end of its last forward (not before the backward's start: ``gpipe`` has no steady phase), the end of its last
    action. A rank without backwards is steady from 0 on.
    """
    table = simulation.table
    bounds = np.zeros((table.p, 4))
    backward = table.kinds >= Kind.B
    for rank in range(table.p):
        row = table.row_of(rank)
        start, end = simulation.start[row], simulation.end[row]
        if not start.size:
            continue
        backwards, forwards = start[backward[row]], end[~backward[row]]
        if not backwards.size:
            bounds[rank] = 0.0, 0.0, end[-1], end[-1]
            continue
        first = backwards[0]
        bounds[rank] = 0.0, first, max(first, forwards.max(initial=0.0)), end[-1]
    return bounds
