"""Every tag is one that the MPI standard grants, and an MPI library that grants less is refused."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from mpipipe.engine.agreement import AGREEMENT_TAG
from mpipipe.errors import SetupError
from mpipipe.transport import COLLECTIVE_TAG, MEETING_TAG, MESSAGE_TAGS
from mpipipe.transport.mpi import MpiTransport
from mpipipe.transport.protocol import REPORT_TAG

GRANTED = 32_767


def test_tags_lie_within_what_the_standard_grants() -> None:
    """Those of messages are below MESSAGE_TAGS: tests/unit/engine/test_compile_program.py."""
    alone = [COLLECTIVE_TAG, AGREEMENT_TAG, MEETING_TAG, REPORT_TAG]
    assert len({COLLECTIVE_TAG, MEETING_TAG, REPORT_TAG}) == 3
    assert REPORT_TAG not in (AGREEMENT_TAG, COLLECTIVE_TAG)
    assert all(MESSAGE_TAGS <= tag <= GRANTED for tag in alone)


def library_granting(limit: int | None) -> SimpleNamespace:
    """An MPI of which nothing may be used before its largest tag is known."""
    return SimpleNamespace(TAG_UB=1, COMM_WORLD=SimpleNamespace(Get_attr=lambda key: limit))


@pytest.mark.parametrize("limit", [0, 1023, REPORT_TAG - 1])
def test_an_mpi_library_with_too_few_tags_is_refused(limit: int) -> None:
    with pytest.raises(SetupError, match=f"tags up to {limit}, and mpipipe needs {REPORT_TAG}"):
        MpiTransport(library_granting(limit))


@pytest.mark.parametrize("limit", [REPORT_TAG, GRANTED, 2**31 - 1, None])
def test_enough_tags_are_enough(limit: int | None) -> None:
    with pytest.raises(AttributeError, match=re.escape("'Dup'")):  # the next thing that is used
        MpiTransport(library_granting(limit))
