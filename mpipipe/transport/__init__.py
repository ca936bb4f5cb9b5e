"""How bytes get from one rank to another: one protocol, two twins (MPI, and loopback within one process)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpipipe.transport.loopback import LoopbackWorld, run_ranks, solo
from mpipipe.transport.protocol import COLLECTIVE_TAG, MEETING_TAG, MESSAGE_TAGS, Request, Transport
from mpipipe.transport.standing import Place, Standing, open_text

if TYPE_CHECKING:
    from mpipipe.transport.mpi import MpiTransport

__all__ = [
    "COLLECTIVE_TAG",
    "MEETING_TAG",
    "MESSAGE_TAGS",
    "LoopbackWorld",
    "Place",
    "Request",
    "Standing",
    "Transport",
    "open_text",
    "open_world",
    "run_ranks",
    "solo",
]


def open_world() -> MpiTransport:
    """All ranks of the launch, over MPI. Collective. Raises ``MissingDependencyError`` without mpi4py or an MPI
    library.
    """
    from mpipipe.transport.mpi import open_mpi_world

    return open_mpi_world()
