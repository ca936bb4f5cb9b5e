"""The schedule table: for every rank the list of its actions, in the order in which it does them.

Letters: p = num_ranks, v = chunks_per_rank, m = num_microbatches, A = number of actions over all ranks.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpipipe.errors import ScheduleError
from mpipipe.schedule.action import Action, Kind, overlap_text, parse_cell

_Number = TypeVar("_Number", bound=np.generic)

MAX_STAGES = int(np.iinfo(np.int16).max)
"""Largest p*v that a table holds: stages are kept as int16."""

_DTYPES = {
    "offsets": np.int64,
    "kinds": np.uint8,
    "stages": np.int16,
    "microbatches": np.int32,
    "overlaps": np.int64,
}


class Extra(NamedTuple):
    """An action of torch's files that is no work of the pipeline (``2UNSHARD``): kept, never executed or compared.

    It stands on ``rank`` before the action at ``row`` of that rank's list.
    """

    rank: int
    row: int
    text: str


def _no_pairs() -> NDArray[np.int64]:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False, repr=False)
class ScheduleTable:
    """What every rank does, in order. Immutable: the arrays are read-only, and copies of those that the caller could
    still write to.

    ``placement`` has the rank of each of the p*v stages. ``lowered`` is true for a table with SEND and RECV actions
    put in. The actions of all ranks lie in flat arrays, rank after rank: ``kinds`` uint8 (A,), ``stages`` int16 (A,),
    ``microbatches`` int32 (A,); rank r owns ``[offsets[r]:offsets[r+1]]``, ``offsets`` int64 (p+1,).

    ``mirror``: for a bidirectional schedule the rank of each stage's second copy, which does the second half of the
    microbatches (from ``first_mirrored`` on); None where every stage exists once. ``overlaps`` int64 (n,), rising: the
    flat index of the first of two neighbouring actions, an F and a B, that run at once. ``extras``: what torch's files
    hold besides.

    Two tables are equal when they do the same: p, v, m, placement, mirror, lowered, overlaps and all actions; name and
    extras do not count.
    A table can be illegal (``find_problems`` says so); only its shape is checked here. Raises ScheduleError.
    """

    name: str
    p: int
    v: int
    m: int
    placement: tuple[int, ...]
    lowered: bool
    offsets: NDArray[np.int64]
    kinds: NDArray[np.uint8]
    stages: NDArray[np.int16]
    microbatches: NDArray[np.int32]
    mirror: tuple[int, ...] | None = None
    overlaps: NDArray[np.int64] = field(default_factory=_no_pairs)
    extras: tuple[Extra, ...] = ()

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES.items():
            object.__setattr__(self, name, _settled(name, getattr(self, name), np.dtype(dtype)))
        try:
            for name in ("p", "v", "m"):
                object.__setattr__(self, name, operator.index(getattr(self, name)))
            object.__setattr__(self, "placement", tuple(operator.index(rank) for rank in self.placement))
            if self.mirror is not None:
                object.__setattr__(self, "mirror", tuple(operator.index(rank) for rank in self.mirror))
        except TypeError as error:
            raise ScheduleError(f"p, v, m and the ranks of a placement are whole numbers: {error}") from None
        self._check_shape()
        self._check_pairs()

    def _check_shape(self) -> None:
        if min(self.p, self.v, self.m) < 1:
            raise ScheduleError(f"a table needs p, v and m of at least 1, found p={self.p} v={self.v} m={self.m}")
        for name, ranks in (("placement", self.placement), ("mirror", self.mirror)):
            if ranks is not None and (len(ranks) != self.p * self.v or not all(0 <= r < self.p for r in ranks)):
                raise ScheduleError(
                    f"{name} must have one rank of 0..{self.p - 1} for each of the p*v = {self.p * self.v} stages, "
                    f"found {len(ranks)} entries: {_short(ranks)}"
                )
        shape = (self.num_actions,)
        if self.offsets.shape != (self.p + 1,) or self.kinds.shape != shape or self.stages.shape != shape:
            raise ScheduleError(f"arrays do not fit {self.p} ranks and {self.num_actions} actions")
        if self.offsets[0] != 0 or self.offsets[-1] != self.num_actions or np.any(np.diff(self.offsets) < 0):
            raise ScheduleError("offsets must rise from 0 to the number of actions")
        if self.num_actions and int(self.kinds.max()) > (Kind.RECV_B if self.lowered else Kind.W):
            raise ScheduleError("a table that is not lowered holds F, B, I and W only")

    def _check_pairs(self) -> None:
        first = self.overlaps
        if not first.size:
            return
        if np.any(np.diff(first) < 2) or first[0] < 0 or first[-1] + 1 >= self.num_actions:
            raise ScheduleError("overlaps must be rising places of pairs that do not share an action")
        ends_a_row = np.isin(first + 1, self.offsets)
        kinds = np.stack((self.kinds[first], self.kinds[first + 1]))
        if np.any(ends_a_row) or not np.all(np.sort(kinds, axis=0) == np.array([[Kind.F], [Kind.B]])):
            raise ScheduleError("an overlapped pair is an F and a B of one rank, one right after the other")

    @property
    def num_stages(self) -> int:
        """p*v."""
        return self.p * self.v

    @property
    def num_actions(self) -> int:
        """Number of actions over all ranks (A)."""
        return int(self.microbatches.shape[0])

    @property
    def forward_only(self) -> bool:
        """True when no action is a backward (B, I or W), as for evaluation."""
        return not bool(np.any((self.kinds >= Kind.B) & (self.kinds <= Kind.W)))

    @property
    def ordered(self) -> bool:
        """True when every stage makes its weight gradients (B or W) in microbatch order."""
        making = np.flatnonzero((self.kinds == Kind.B) | (self.kinds == Kind.W))
        stages, microbatches = self.stages[making], self.microbatches[making]
        by_stage = np.argsort(stages, kind="stable")
        stages, microbatches = stages[by_stage], microbatches[by_stage]
        rising = microbatches[1:] > microbatches[:-1]
        return bool(np.all(rising | (stages[1:] != stages[:-1])))

    @property
    def first_mirrored(self) -> int:
        """The first microbatch that a stage's second copy does: m where there is none."""
        return self.m if self.mirror is None else (self.m + 1) // 2

    def owners(self) -> NDArray[np.int64]:
        """The rank to which each action belongs, int64 (A,). Stages must be in range."""
        owners: NDArray[np.int64] = np.asarray(self.placement, dtype=np.int64)[self.stages]
        if self.mirror is not None:
            mirrored = self.microbatches >= self.first_mirrored
            owners[mirrored] = np.asarray(self.mirror, dtype=np.int64)[self.stages[mirrored]]
        return owners

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank that does ``stage`` for ``microbatch``."""
        if self.mirror is not None and microbatch >= self.first_mirrored:
            return self.mirror[stage]
        return self.placement[stage]

    def row_of(self, rank: int) -> slice:
        """Slice of the flat arrays that is the list of ``rank``."""
        return slice(int(self.offsets[rank]), int(self.offsets[rank + 1]))

    def action(self, index: int) -> Action:
        """The action at a position of the flat arrays."""
        return Action(int(self.stages[index]), Kind(int(self.kinds[index])), int(self.microbatches[index]))

    def actions(self, rank: int) -> list[Action]:
        """The actions of ``rank`` in order."""
        row = self.row_of(rank)
        kinds = list(Kind)
        columns = (self.stages[row].tolist(), self.kinds[row].tolist(), self.microbatches[row].tolist())
        return [Action(stage, kinds[kind], microbatch) for stage, kind, microbatch in zip(*columns, strict=True)]

    def rows(self, *, pairs: bool = True) -> list[list[str]]:
        """The text of every action, one list a rank.

        An overlapped pair is one text, ``(0F3;3B1)OVERLAP_F_B``, unless ``pairs`` is false: then two.
        """
        rows = [[str(action) for action in self.actions(rank)] for rank in range(self.p)]
        for first in self.overlaps[::-1].tolist() if pairs else ():
            rank = int(np.searchsorted(self.offsets, first, side="right")) - 1
            row = first - int(self.offsets[rank])
            rows[rank][row : row + 2] = [overlap_text(*rows[rank][row : row + 2])]
        return rows

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Iterable[str]],
        *,
        name: str = "custom",
        v: int | None = None,
        m: int | None = None,
        placement: Sequence[int] | None = None,
        mirror: Sequence[int] | None = None,
    ) -> ScheduleTable:
        """The table of action texts, one row a rank; empty cells are left out.

        A cell is what ``parse_cell`` takes: an action, an overlapped pair, or an action of torch's files that is kept
        as an extra. What is not given is read off the rows: each stage is placed on the first rank that names it, v =
        stages / p, m = largest microbatch + 1. Raises ScheduleError for a text that is none of these, and where
        placement and v can't be read off.
        """
        parsed, overlaps, extras = _parse(rows)
        p = len(parsed)
        if p == 0:
            raise ScheduleError("a table needs at least one row: one row a rank")
        if placement is None:
            placement = _placement_of(parsed)
        if v is None:
            v, rest = divmod(len(placement), p)
            if rest or v == 0:
                raise ScheduleError(f"{len(placement)} stages do not go evenly on {p} ranks: give v and placement")
        if m is None:
            m = 1 + max((action.microbatch for row in parsed for action in row), default=0)
        flat = [action for row in parsed for action in row]
        _check_range(flat)
        kinds = np.array([action.kind for action in flat], dtype=np.uint8)
        return cls(
            name=name,
            p=p,
            v=v,
            m=m,
            placement=tuple(placement),
            lowered=bool(kinds.size) and int(kinds.max()) > Kind.W,
            offsets=np.concatenate(([0], np.cumsum([len(row) for row in parsed]))).astype(np.int64),
            kinds=kinds,
            stages=np.array([action.stage for action in flat], dtype=np.int16),
            microbatches=np.array([action.microbatch for action in flat], dtype=np.int32),
            mirror=None if mirror is None else tuple(mirror),
            overlaps=np.array(overlaps, dtype=np.int64),
            extras=tuple(extras),
        )

    def _key(self) -> tuple[Any, ...]:
        return (self.p, self.v, self.m, self.placement, self.mirror, self.lowered)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ScheduleTable):
            return NotImplemented
        return self._key() == other._key() and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in _DTYPES
        )

    def __hash__(self) -> int:
        return hash((*self._key(), *(getattr(self, name).tobytes() for name in _DTYPES)))

    def digest(self) -> str:
        """32 hex digits that equal tables have in common, on every machine, and others do not."""
        found = hashlib.blake2b(repr(self._key()).encode(), digest_size=16)
        for name, dtype in _DTYPES.items():
            found.update(np.ascontiguousarray(getattr(self, name), dtype=np.dtype(dtype).newbyteorder("<")).data)
        return found.hexdigest()

    def __repr__(self) -> str:
        return (
            f"<ScheduleTable {self.name} p={self.p} v={self.v} m={self.m} actions={self.num_actions}"
            f"{' lowered' if self.lowered else ''}>"
        )

    def __str__(self) -> str:
        from mpipipe.schedule.draw.text import table_text

        return table_text(self)


def frozen(array: NDArray[_Number]) -> NDArray[_Number]:
    """``array`` itself, made read-only: a table keeps it without a copy. For arrays that nobody else has."""
    array.flags.writeable = False
    return array


def _settled(name: str, given: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """``given`` as a read-only array of ``dtype`` that nobody can write to: itself, or a copy. Raises ScheduleError for
    what is not whole numbers, or does not fit."""
    try:
        array = np.asarray(given)
    except (ValueError, TypeError, OverflowError):
        raise ScheduleError(f"{name} must be one list of whole numbers") from None
    if array.ndim != 1:
        raise ScheduleError(f"{name} must be one list of whole numbers, found {array.ndim} dimensions")
    if array.dtype == dtype:
        if array.flags.c_contiguous and _is_fixed(array):
            return array
        return frozen(np.array(array, order="C", subok=False))
    if array.size:
        if array.dtype.kind not in "iu":
            raise ScheduleError(f"{name} must be whole numbers, found {array.dtype}")
        limits = np.iinfo(dtype)
        for end in (int(array.min()), int(array.max())):
            if not limits.min <= end <= limits.max:
                raise ScheduleError(f"{name} holds {end}: its numbers go from {limits.min} to {limits.max}")
    return frozen(np.array(array, dtype=dtype, order="C"))


def _is_fixed(array: NDArray[Any]) -> bool:
    """Whether no array through which the numbers can be reached may be written to."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return False
        if owner.base is None:
            return bool(owner.flags.owndata)
        owner = owner.base
    return False


def _parse(rows: Sequence[Iterable[str]]) -> tuple[list[list[Action]], list[int], list[Extra]]:
    """The actions of each row, the flat places of the first actions of pairs, and the extras."""
    parsed: list[list[Action]] = []
    overlaps: list[int] = []
    extras: list[Extra] = []
    done = 0
    for rank, row in enumerate(rows):
        actions: list[Action] = []
        for text in row:
            if not text.strip():
                continue
            found = parse_cell(text)
            if isinstance(found, str):
                extras.append(Extra(rank, len(actions), found))
                continue
            if len(found) == 2:
                overlaps.append(done + len(actions))
            actions.extend(found)
        parsed.append(actions)
        done += len(actions)
    return parsed, overlaps, extras


def _placement_of(rows: list[list[Action]]) -> list[int]:
    owner: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            owner.setdefault(action.stage, rank)
    missing = sorted(set(range(max(owner, default=-1) + 1)) - set(owner))
    if missing or not owner:
        raise ScheduleError(f"no rank names stage {missing[0] if missing else 0}: give placement")
    return [owner[stage] for stage in range(len(owner))]


def _check_range(actions: list[Action]) -> None:
    largest = int(np.iinfo(np.int32).max)
    for action in actions:
        if action.stage > MAX_STAGES or action.microbatch > largest:
            raise ScheduleError(
                f"{action}: stages go up to {MAX_STAGES}, microbatches up to {largest}", action=str(action)
            )


def _short(values: tuple[int, ...]) -> str:
    text = " ".join(str(value) for value in values[:16])
    return text + (" ..." if len(values) > 16 else "")
