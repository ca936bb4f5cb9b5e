"""One action of a pipeline schedule and its text, as ``2F0`` or ``1SEND_F3``.

The grammar is that of torch.distributed.pipelining: ``{stage}{kind}{microbatch}``.
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


_PATTERN = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)")


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
