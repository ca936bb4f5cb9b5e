"""What the actions of a table cost: durations, messages, and how a real machine departs from them.

Letters: p = num_ranks, S = number of stages, A = number of actions. Times are in any one unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from mpipipe.errors import ScheduleError
from mpipipe.schedule.table import ScheduleTable


@dataclass(frozen=True)
class Costs:
    """Duration of one chunk's forward (F), input gradient (I) and weight gradient (W): one number, or one per stage. B
    costs I + W.

    ``FB``: duration of an overlapped pair of a forward and a backward, one number for all pairs; None: F + B of the
    two, so that the overlap gains nothing.
    """

    F: float | Sequence[float] = 1.0
    I: float | Sequence[float] = 1.0  # noqa: E741
    W: float | Sequence[float] = 1.0
    FB: float | None = None

    def per_stage(self, num_stages: int) -> NDArray[np.float64]:
        """float64 (4, S): durations of F, B, I and W of every stage. Raises ScheduleError for a wrong length or a
        negative duration."""
        rows = {name: per_stage(f"costs {name}", getattr(self, name), num_stages) for name in ("F", "I", "W")}
        return np.stack((rows["F"], rows["I"] + rows["W"], rows["I"], rows["W"]))

    def per_action(self, table: ScheduleTable) -> NDArray[np.float64]:
        """float64 (A,): the duration of each action of a compute-only table.

        Of an overlapped pair the first action has the duration of both, the second 0. Raises ScheduleError, also for an
        FB that is shorter than one of the actions of a pair.
        """
        durations = self.per_stage(table.num_stages)[table.kinds, table.stages]
        pairs = table.overlaps
        if pairs.size:
            longer = np.maximum(durations[pairs], durations[pairs + 1])
            both = durations[pairs] + durations[pairs + 1]
            if self.FB is not None:
                if not math.isfinite(self.FB) or bool(np.any(longer > self.FB)):
                    raise ScheduleError(
                        f"costs FB = {self.FB!r}: two actions at once take no less than the longer of them, "
                        f"{float(longer.max()):g}"
                    )
                both = np.full(pairs.size, float(self.FB))
            durations[pairs], durations[pairs + 1] = both, 0.0
        return durations


def per_stage(what: str, given: float | Sequence[float], num_stages: int) -> NDArray[np.float64]:
    """float64 (S,) of one number or one per stage. Raises ScheduleError for a wrong length, a negative number or one
    that is not finite."""
    row = np.asarray(given, dtype=np.float64)
    if row.ndim > 1 or (row.ndim == 1 and row.shape[0] != num_stages):
        raise ScheduleError(f"{what}: found {row.size} numbers, give 1, or {num_stages}: one per stage")
    if not np.all(np.isfinite(row)) or np.any(row < 0):
        raise ScheduleError(f"{what} = {given!r}: finite numbers, 0 or more")
    return np.broadcast_to(row, (num_stages,))


@dataclass(frozen=True)
class Hops:
    """What a message between two ranks costs: ``latency`` + bytes / ``bandwidth``, one way; nothing inside a rank.

    ``nbytes``: size of the output of a stage for one microbatch, and of its gradient: one number, or one per stage
    (that of the last stage is not sent). ``bandwidth`` in bytes per unit of time. Messages do not slow each other down.
    """

    latency: float = 0.0
    nbytes: float | Sequence[float] = 0.0
    bandwidth: float = math.inf

    def per_stage(self, num_stages: int) -> NDArray[np.float64]:
        """float64 (S,): time of a message between stage s and stage s+1. Raises ScheduleError."""
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise ScheduleError(f"latency = {self.latency!r} must be a finite number, 0 or more")
        if not self.bandwidth > 0:
            raise ScheduleError(f"bandwidth = {self.bandwidth!r} must be a number above 0")
        return self.latency + per_stage("message bytes", self.nbytes, num_stages) / self.bandwidth


@dataclass(frozen=True)
class Disturbance:
    """How durations depart from their costs, the same for the same seed.

    Each action's duration is multiplied by exp(``jitter`` * x), x drawn from the normal distribution, and by the factor
    of its rank in ``slow_ranks``. With ``pause_probability`` an action takes ``pause`` longer, as when the machine does
    something else. Draws are those of numpy's PCG64, in the order of the flat actions.
    """

    seed: int = 0
    jitter: float = 0.0
    slow_ranks: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    pause_probability: float = 0.0
    pause: float = 0.0

    def apply(self, table: ScheduleTable, durations: NDArray[np.float64]) -> NDArray[np.float64]:
        """float64 (A,): ``durations`` (A,) disturbed. Raises ScheduleError for a rank that the table lacks and for
        numbers out of range."""
        self._check(table)
        random = np.random.Generator(np.random.PCG64(self.seed))
        factors = np.ones(table.num_actions)
        if self.jitter:
            factors = np.exp(self.jitter * random.standard_normal(table.num_actions))
        for rank, factor in self.slow_ranks.items():
            factors[table.row_of(rank)] *= factor
        late = np.zeros(table.num_actions)
        if self.pause_probability:
            late[random.random(table.num_actions) < self.pause_probability] = self.pause
            late[table.overlaps + 1] = 0.0
        return durations * factors + late

    def _check(self, table: ScheduleTable) -> None:
        if not (math.isfinite(self.jitter) and self.jitter >= 0):
            raise ScheduleError(f"jitter = {self.jitter!r} must be a finite number, 0 or more")
        if not 0 <= self.pause_probability <= 1 or not (math.isfinite(self.pause) and self.pause >= 0):
            raise ScheduleError(
                f"pause = {self.pause!r} with probability {self.pause_probability!r}: a length of 0 or more, and a "
                "probability of 0 to 1"
            )
        for rank, factor in self.slow_ranks.items():
            if not 0 <= rank < table.p or not (math.isfinite(factor) and factor > 0):
                raise ScheduleError(
                    f"slow rank {rank} by {factor!r}: the table has ranks 0..{table.p - 1}, a factor is above 0"
                )
