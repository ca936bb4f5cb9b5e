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

LARGEST, LEAST = 1e100, 1e-100
"""Times that are not 0 lie between these: sums and ratios over any table are finite."""


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
        """float64 (4, S): durations of F, B, I and W of every stage. Raises ScheduleError for a wrong length and for a
        duration that is negative, above ``LARGEST`` or between 0 and ``LEAST``; also for such an FB."""
        if self.FB is not None:
            if np.ndim(self.FB):
                raise ScheduleError(f"costs FB = {_told(self.FB)}: one number, for all pairs")
            per_stage("costs FB", self.FB, num_stages)
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
                if bool(np.any(longer > self.FB)):
                    raise ScheduleError(
                        f"costs FB = {self.FB!r}: two actions at once take no less than the longer of them, "
                        f"{float(longer.max()):g}"
                    )
                both = np.full(pairs.size, float(self.FB))
            durations[pairs], durations[pairs + 1] = both, 0.0
        return durations


def per_stage(what: str, given: float | Sequence[float], num_stages: int) -> NDArray[np.float64]:
    """float64 (S,) of one number or one per stage. Raises ScheduleError for a wrong length and for what is not 0 or a
    number from ``LEAST`` to ``LARGEST``."""
    try:
        row = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ScheduleError(f"{what} = {_told(given)}: {_ALLOWED}") from None
    if row.ndim > 1 or (row.ndim == 1 and row.shape[0] != num_stages):
        raise ScheduleError(f"{what}: found {row.size} numbers, give 1, or {num_stages}: one per stage")
    if isinstance(given, str | bytes) or not np.all((row == 0) | ((row >= LEAST) & (row <= LARGEST))):
        raise ScheduleError(f"{what} = {_told(given)}: {_ALLOWED}")
    return np.broadcast_to(row, (num_stages,))


_ALLOWED = f"give 0, or a number from {LEAST:g} to {LARGEST:g}"


def _told(value: object) -> str:
    """The value as a message shows it."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of more digits than Python prints
        return "a number of too many digits"
    return text if len(text) <= 80 else f"{text[:76]} ..."


def _is_number(value: object) -> bool:
    """Whether ``value`` is a finite number; no text, no truth value."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


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
        if not _is_number(self.latency):
            raise ScheduleError(f"latency = {_told(self.latency)} must be a finite number, 0 or more")
        per_stage("latency", self.latency, 1)
        if not (_is_number(self.bandwidth) or self.bandwidth == math.inf) or not self.bandwidth > 0:
            raise ScheduleError(f"bandwidth = {_told(self.bandwidth)} must be a number above 0")
        with np.errstate(over="ignore", under="ignore"):
            way = per_stage("message bytes", self.nbytes, num_stages) / float(self.bandwidth)
        if not bool(np.all(way <= LARGEST)):
            raise ScheduleError(
                f"a message of {_told(self.nbytes)} bytes takes too long at bandwidth = {self.bandwidth!r}: "
                f"no more than {LARGEST:g}"
            )
        return self.latency + way


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
            with np.errstate(over="ignore", under="ignore"):
                factors = np.exp(self.jitter * random.standard_normal(table.num_actions))
        for rank, factor in self.slow_ranks.items():
            factors[table.row_of(rank)] *= factor
        late = np.zeros(table.num_actions)
        if self.pause_probability:
            late[random.random(table.num_actions) < self.pause_probability] = self.pause
            late[table.overlaps + 1] = 0.0
        with np.errstate(over="ignore", invalid="ignore"):
            disturbed: NDArray[np.float64] = durations * factors + late
        if not bool(np.all(disturbed <= LARGEST**2)):
            raise ScheduleError(
                f"jitter = {self.jitter!r} or the factor of a slow rank is too large: an action takes longer than "
                f"{LARGEST**2:g}"
            )
        return disturbed

    def _check(self, table: ScheduleTable) -> None:
        if not isinstance(self.seed, int | np.integer) or isinstance(self.seed, bool) or self.seed < 0:
            raise ScheduleError(f"seed = {_told(self.seed)} must be a whole number, 0 or more")
        if not _is_number(self.jitter) or self.jitter < 0:
            raise ScheduleError(f"jitter = {_told(self.jitter)} must be a finite number, 0 or more")
        given = (self.pause_probability, self.pause)
        if not all(map(_is_number, given)) or not 0 <= self.pause_probability <= 1 or not 0 <= self.pause <= LARGEST:
            raise ScheduleError(
                f"pause = {self.pause!r} with probability {self.pause_probability!r}: a length of 0 or more, and a "
                "probability of 0 to 1"
            )
        for rank, factor in self.slow_ranks.items():
            if not _is_number(rank) or not 0 <= rank < table.p or not _is_number(factor) or factor <= 0:
                raise ScheduleError(
                    f"slow rank {rank} by {factor!r}: the table has ranks 0..{table.p - 1}, a factor is above 0"
                )
