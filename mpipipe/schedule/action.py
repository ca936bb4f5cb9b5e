"""One action of a pipeline schedule and its text, as ``2F0`` or ``1SEND_F3``.

The grammar is that of torch.distributed.pipelining: ``{stage}{kind}{microbatch}``, and ``(0F3;3B1)OVERLAP_F_B`` for
two that run at once.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import NamedTuple

from mpipipe.errors import ScheduleError


class Kind(IntEnum):
    """What an action does. B is I and W at once.

    ``2SEND_F3``: stage 2 sends its output of microbatch 3 to stage 3. ``3RECV_F3``: stage 3 takes it.
    ``2SEND_B3``: stage 2 sends the gradient of its input to stage 1. ``1RECV_B3``: stage 1 takes it.
    """

    F = 0
    """Forward."""
    B = 1
    """Whole backward: input gradient and weight gradient."""
    I = 2  # noqa: E741
    """Input gradient only."""
    W = 3
    """Weight gradient only."""
    SEND_F = 4
    RECV_F = 5
    SEND_B = 6
    RECV_B = 7


_PATTERN = re.compile(r"([0-9]{1,9})(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)([0-9]{1,9})")


_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_EXTRA = re.compile(r"[0-9]{1,9}(UNSHARD|RESHARD|REDUCE_GRAD)")


class Action(NamedTuple):
    """One action: a stage does ``kind`` for one microbatch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.name}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that ``text`` names. Raises ScheduleError for anything else than stage, kind, microbatch."""
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"'{text}' is no action: expected stage, kind and microbatch as in 2F0 or 1SEND_F3, "
                f"with one of the kinds {' '.join(kind.name for kind in Kind)}",
                action=text,
            )
        stage, kind, microbatch = match.groups()
        return cls(int(stage), Kind[kind], int(microbatch))


def overlap_text(first: str, second: str) -> str:
    """The text of two actions that run at once, in the order given: ``(0F3;3B1)OVERLAP_F_B``."""
    return f"({first};{second})OVERLAP_F_B"


def parse_cell(text: str) -> tuple[Action, ...] | str:
    """What one cell of a table says: one action, the two of ``(0F3;3B1)OVERLAP_F_B``, or the text of an action of
    torch.distributed.pipelining that is no work of the pipeline (``2UNSHARD``, ``2RESHARD``, ``0REDUCE_GRAD``).

    Raises ScheduleError for anything else, and for a pair that is not an F and a B.
    """
    text = text.strip()
    if _EXTRA.fullmatch(text):
        return text
    pair = _PAIR.fullmatch(text)
    if pair is None:
        return (Action.parse(text),)
    actions = (Action.parse(pair[1]), Action.parse(pair[2]))
    if {action.kind for action in actions} != {Kind.F, Kind.B}:
        raise ScheduleError(f"'{text}' is no pair: an F and a B run at once, as in (0F3;3B1)OVERLAP_F_B", action=text)
    return actions
