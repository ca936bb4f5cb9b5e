"""What the engine and the collectives ask of a transport.

Both twins pass tests/contracts/test_transport.py, which is written once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Protocol

from mpipipe.transport.awareness import Finding
from mpipipe.transport.standing import PlaceOf, Standing

if TYPE_CHECKING:  # a type only: a rank without torch must be able to tell the others
    from mpipipe.device import Memory

MESSAGE_TAGS = 32_000
"""Tags 0 to 31,999 belong to the messages of a schedule. 32,767 is all that the MPI standard grants."""

COLLECTIVE_TAG = 32_000
"""The tag of everything that ``mpipipe.collectives`` sends."""

MEETING_TAG = 32_001
"""The tag by which ranks meet after a fault: one of them may be alone with it, and the others in another exchange."""

REPORT_TAG = 32_003
"""The tag by which ranks tell where they are once a wait has run out."""


class Request(Protocol):
    """One send or receive under way, of a transport's own or made of one: ``Transport.wait`` takes any."""

    @property
    def peer(self) -> int:
        """The rank at the other end."""

    def test(self) -> bool:
        """True once it is complete. Moves data where the library needs a call for that. Never blocks.

        Raises ``MessageMismatchError`` for a receive whose message had another size, ``TransportError`` when it failed.
        """


class Transport(Protocol):
    """Point-to-point messages between the ranks of one job.

    Messages of one sender, receiver and tag arrive in the order in which they were sent. ``memory`` belongs to the
    transport from the call until the request is complete. Memory of a GPU goes only where that was proved
    (``mpipipe.transport.proof``): its bytes are there before the call, and the caller keeps it alive.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def local_size(self) -> int:
        """Ranks of this job on this node, this one included."""

    @property
    def local_rank(self) -> int:
        """This rank's number among those of this node, from 0."""

    @property
    def library(self) -> str:
        """What moves the bytes, in words, for logs and traces."""

    def cuda_findings(self) -> list[Finding]:
        """What is known of whether ``isend`` and ``irecv`` take memory of a GPU; nothing, if nothing is."""

    def isend(self, memory: Memory, peer: int, tag: int) -> Request:
        """Begin to send all bytes of ``memory``. Never blocks."""

    def irecv(self, memory: Memory, peer: int, tag: int) -> Request:
        """Begin to receive exactly ``memory.nbytes`` bytes."""

    def poll(self) -> None:
        """Let the library move the data of this rank's open requests. Never blocks.

        MPI moves a long message only inside its own calls, unless the receiver can read the sender's memory: a rank
        that computes without a call keeps the other one waiting. Call it as often as you like, at least every few
        milliseconds, while requests are open: it costs a fraction of a microsecond, and about 4 us every millisecond.
        Raises ``TransportTimeoutError`` once another rank has waited past the time limit.
        """

    def wait(self, request: Request, what: str) -> None:
        """Return once the request is complete.

        ``what`` names it in errors. Raises ``TransportTimeoutError`` after the transport's time limit, on every rank
        that waits then: the lowest of them has where all are, and who waits for whom, as a note.
        """

    def describe_by(self, place_of: PlaceOf) -> None:
        """Take the rank's place in such a report from here on from ``place_of``."""

    def standing(self, look: bool = False) -> Standing:
        """Where this rank is and what it waits for. ``look``: requests may be tested. Without it, safe in a signal
        handler of the rank's own thread.
        """

    def configure(self, *, timeout_s: float, wait: str) -> None:
        """Set the time limit of every wait and the policy, one of ``waiting.POLICIES``."""

    def abort(self, code: int) -> NoReturn:
        """End every rank of the job now."""

    def close(self) -> None:
        """Collective: no rank uses the transport after this."""
