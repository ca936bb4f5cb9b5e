"""From a schedule table to one rank's list of operations, with peers and tags."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from mpipipe.errors import ScheduleError
from mpipipe.schedule import Action, Kind, ScheduleTable, lower
from mpipipe.topology import chunk_of
from mpipipe.transport import MESSAGE_TAGS

_ORDINALS = MESSAGE_TAGS // 2
_RECEIVES = (Kind.RECV_F, Kind.RECV_B)
_SENDS = (Kind.SEND_F, Kind.SEND_B)


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a rank.

    ``row``: position in the rank's compute-only row; for a message, that of the action which makes or needs it.
    ``peer`` and ``tag``: of a message, else -1 (``tag + 1`` is the tag of its header). ``ordinal``: number of the
    message among all from its sender to its receiver in a step. ``polls``: it computes, and so does the one before: no
    call of MPI lies between them.
    """

    kind: Kind
    stage: int
    chunk: int
    microbatch: int
    row: int
    peer: int = -1
    tag: int = -1
    ordinal: int = 0
    polls: bool = False

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.name}{self.microbatch}"

    @property
    def name(self) -> str:
        """The message in the words of its sender, as ``1SEND_F3`` for what stage 2 receives as ``2RECV_F3``."""
        if self.kind == Kind.RECV_F:
            return f"{self.stage - 1}SEND_F{self.microbatch}"
        if self.kind == Kind.RECV_B:
            return f"{self.stage + 1}SEND_B{self.microbatch}"
        return str(self)


@dataclass(frozen=True, slots=True)
class RankProgram:
    """What one rank does in one run of a table. ``receives`` are its receive operations in order,
    ``split`` the stages whose backward is split, ``first_trained`` the first stage that makes gradients."""

    table: ScheduleTable
    rank: int
    ops: tuple[Op, ...]
    receives: tuple[Op, ...]
    forward_only: bool
    split: frozenset[int]
    first_trained: int = 0

    def ends_with_forward(self, stage: int) -> bool:
        """Whether a microbatch is done with ``stage`` after its forward."""
        return self.forward_only or stage < self.first_trained


def _peer_of(action: Action, placement: tuple[int, ...]) -> int:
    """The rank at the other end of a message."""
    up = action.kind in (Kind.SEND_F, Kind.RECV_B)
    return placement[action.stage + 1 if up else action.stage - 1]


def _sent_as(action: Action) -> tuple[Kind, int, int]:
    """A receive's message as its sender names it."""
    if action.kind == Kind.RECV_F:
        return Kind.SEND_F, action.stage - 1, action.microbatch
    return Kind.SEND_B, action.stage + 1, action.microbatch


def _receive_order(actions: list[Action], placement: tuple[int, ...], sender: int) -> Iterator[tuple[Kind, int, int]]:
    for action in actions:
        if action.kind in _RECEIVES and _peer_of(action, placement) == sender:
            yield _sent_as(action)


class _Numbers:
    """Numbers the messages of each pair of ranks in the order in which their receiver takes them; both ends count
    alike.
    """

    def __init__(self, table: ScheduleTable) -> None:
        self._table = table
        self._known: dict[tuple[int, int], dict[tuple[Kind, int, int], int]] = {}

    def of(self, sender: int, receiver: int) -> dict[tuple[Kind, int, int], int]:
        pair = (sender, receiver)
        if pair not in self._known:
            order = _receive_order(self._table.actions(receiver), self._table.placement, sender)
            self._known[pair] = {message: number for number, message in enumerate(order)}
            self._check(pair)
        return self._known[pair]

    def _check(self, pair: tuple[int, int]) -> None:
        """With so many messages that tags repeat, those that share a tag must be sent in the order in which they are
        received.
        """
        numbers = self._known[pair]
        if len(numbers) <= _ORDINALS:
            return
        last: dict[int, int] = {}
        for action in self._table.actions(pair[0]):
            if action.kind in _SENDS and _peer_of(action, self._table.placement) == pair[1]:
                number = numbers[(action.kind, action.stage, action.microbatch)]
                if last.get(number % _ORDINALS, -1) > number:
                    raise ScheduleError(f"{action}: over {_ORDINALS} messages overtake each other", action=str(action))
                last[number % _ORDINALS] = number


def _without_unused(lowered: ScheduleTable, first_trained: int) -> ScheduleTable:
    """The lowered table without the gradients that stages up to ``first_trained`` would send."""
    sent = (lowered.kinds == Kind.SEND_B) & (lowered.stages <= first_trained)
    received = (lowered.kinds == Kind.RECV_B) & (lowered.stages < first_trained)
    kept = np.flatnonzero(~(sent | received))
    return replace(
        lowered,
        offsets=np.searchsorted(kept, lowered.offsets).astype(np.int64),
        kinds=lowered.kinds[kept],
        stages=lowered.stages[kept],
        microbatches=lowered.microbatches[kept],
        extras=(),
    )


def compile_program(table: ScheduleTable, rank: int, first_trained: int = 0) -> RankProgram:
    """The operations of ``rank``.

    ``table`` is the compute-only table; sends and receives are put in here. The two actions of an overlapped pair are
    done one after the other. ``first_trained``: the first stage with a trainable parameter; no gradient goes to the
    stages before it, whose B, I and W stay in the list. Raises ``ScheduleError`` for a table with two copies of a
    stage, which this version can draw and simulate, and not execute.
    """
    if table.mirror is not None:
        raise ScheduleError(
            f"schedule '{table.name}' keeps every stage on two ranks: this version draws, checks and simulates such "
            "tables and does not execute them. Take a schedule with one copy of each stage, as pipeline.schedule = "
            "'zb-v' or 'dualpipe-v'"
        )
    lowered = _without_unused(lower(replace(table, overlaps=table.overlaps[:0])), first_trained)
    numbers = _Numbers(lowered)
    ops: list[Op] = []
    row = -1
    for action in lowered.actions(rank):
        chunk = chunk_of(table.placement, action.stage)
        if action.kind <= Kind.W:
            row += 1
            polls = bool(ops) and ops[-1].kind <= Kind.W
            ops.append(Op(action.kind, action.stage, chunk, action.microbatch, row, polls=polls))
        else:
            sending = action.kind in _SENDS
            peer = _peer_of(action, table.placement)
            message = (action.kind, action.stage, action.microbatch) if sending else _sent_as(action)
            number = (numbers.of(rank, peer) if sending else numbers.of(peer, rank))[message]
            tag = 2 * (number % _ORDINALS)
            ops.append(
                Op(action.kind, action.stage, chunk, action.microbatch, row if sending else row + 1, peer, tag, number)
            )
    receives = tuple(op for op in ops if op.kind in _RECEIVES)
    split = frozenset(op.stage for op in ops if op.kind == Kind.I)
    return RankProgram(table, rank, tuple(ops), receives, table.forward_only, split, first_trained)
