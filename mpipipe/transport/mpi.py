"""The MPI twin: ``Isend`` and ``Irecv`` on a private communicator. The one file that imports mpi4py."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from mpipipe import environment
from mpipipe.environment import OUTPUT_PASSES_WITHIN_S, check_world
from mpipipe.errors import (
    LauncherMismatchError,
    MessageMismatchError,
    MissingDependencyError,
    SetupError,
    TransportError,
    TransportTimeoutError,
)
from mpipipe.transport.protocol import REPORT_TAG, Request
from mpipipe.transport.standing import Place, PlaceOf, Standing, report_text
from mpipipe.transport.waiting import Waiter

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpipipe.device import Memory

_log = logging.getLogger(__name__)

REPORTS_WITHIN_S = 2.0
"""Once a wait has run out, the ranks that wait too tell where they are within this time."""

_REPORTS_NAP_S = 2e-3

MAX_PIECE_BYTES = 1 << 30
"""A longer message goes in pieces: Open MPI 5 refuses more than 2**31 - 1 elements in one call."""

DEFAULT_TIMEOUT_S = 600.0


class _MpiRequest:
    """The pieces of one message; complete when all are. ``expected`` holds a receive's piece sizes, and is empty for a
    send.
    """

    __slots__ = ("_error_class", "_expected", "_keep", "_next", "_pieces", "_status", "peer")

    def __init__(
        self,
        pieces: list[MPI.Request],
        expected: list[int],
        status: MPI.Status | None,
        keep: object,
        error_class: type[Exception],
        peer: int,
    ) -> None:
        self.peer = peer
        self._pieces = pieces
        self._expected = expected
        self._status = status
        self._keep = keep
        self._next = 0
        self._error_class = error_class

    def test(self) -> bool:
        try:
            while self._next < len(self._pieces):
                if not self._pieces[self._next].Test(self._status):
                    return False
                self._check_size()
                self._next += 1
        except self._error_class as error:
            raise self._explain(error) from error
        self._keep = None
        return True

    def _check_size(self) -> None:
        if self._status is None or not self._expected:
            return
        found, expected = self._status.count, self._expected[self._next]
        if found != expected:
            raise MessageMismatchError(f"a message of {found} bytes arrived where {expected} bytes were expected")

    def _explain(self, error: Exception) -> TransportError:
        if "truncat" in str(error).lower():
            size = f"{self._expected[self._next]} bytes" if self._expected else "less"
            return MessageMismatchError(f"a longer message arrived where {size} were expected ({error})")
        return TransportError(f"MPI reports: {error}")


class _Reports:
    """What the ranks tell each other once a wait has run out. Whoever gives up tells all others; who waits then finds
    it, gives up too and tells; who does not wait is known by its silence.
    """

    def __init__(self, mpi: Any, comm: MPI.Intracomm) -> None:
        self._mpi = mpi
        self._comm = comm
        self._sends: list[MPI.Request] = []
        self.found: dict[int, Standing] = {}

    def arrived(self) -> bool:
        """Whether another rank has given up. Never blocks."""
        status = self._mpi.Status()
        with suppress(self._mpi.Exception):
            while self._comm.Iprobe(self._mpi.ANY_SOURCE, REPORT_TAG, status):
                packed = bytearray(status.Get_count(self._mpi.BYTE))
                self._comm.Recv([packed, self._mpi.BYTE], status.Get_source(), REPORT_TAG)
                standing = Standing.unpack(bytes(packed))
                self.found[standing.rank] = standing
        return bool(self.found)

    def exchange(self, mine: Standing) -> dict[int, Standing]:
        """Tell ``mine`` to all others, and gather theirs for REPORTS_WITHIN_S, or until all have told."""
        size, packed = self._comm.Get_size(), mine.pack()
        with suppress(self._mpi.Exception):
            for rank in range(size):
                if rank != mine.rank:
                    self._sends.append(self._comm.Isend([packed, self._mpi.BYTE], rank, REPORT_TAG))
        deadline = time.monotonic() + REPORTS_WITHIN_S
        while len(self.found) < size - 1 and time.monotonic() < deadline:
            self.arrived()
            time.sleep(_REPORTS_NAP_S)
        found, self.found = self.found | {mine.rank: mine}, {}
        return found


class MpiTransport:
    """Every rank of the launch, on a duplicate of ``MPI.COMM_WORLD``."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        world = mpi.COMM_WORLD
        self._comm: MPI.Intracomm = world.Dup()
        self._comm.Set_errhandler(mpi.ERRORS_RETURN)
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()
        node = self._comm.Split_type(mpi.COMM_TYPE_SHARED)
        self.local_size: int = node.Get_size()
        node.Free()
        self.library: str = mpi.Get_library_version().split("\n")[0].strip().rstrip("\0")
        self._waiter = Waiter("auto", self.local_size, DEFAULT_TIMEOUT_S)
        self._closed = False
        self._waits = ("", -1)
        self._place_of: PlaceOf = lambda look: Place()
        self._reports = _Reports(mpi, self._comm)
        tag_limit = self._comm.Get_attr(mpi.TAG_UB)
        if tag_limit is not None and tag_limit < REPORT_TAG:
            raise SetupError(f"this MPI library allows tags up to {tag_limit}; {REPORT_TAG} are needed")

    def isend(self, memory: Memory, peer: int, tag: int) -> Request:
        comm = self._comm
        try:
            pieces = [comm.Isend([part, part.nbytes, self._mpi.BYTE], peer, tag) for part in _pieces(memory)]
        except self._mpi.Exception as error:
            raise TransportError(f"MPI refuses to send to rank {peer}: {error}", rank=self.rank, peer=peer) from error
        return _MpiRequest(pieces, [], None, memory, self._mpi.Exception, peer)

    def irecv(self, memory: Memory, peer: int, tag: int) -> Request:
        comm, parts = self._comm, _pieces(memory)
        try:
            pieces = [comm.Irecv([part, part.nbytes, self._mpi.BYTE], peer, tag) for part in parts]
        except self._mpi.Exception as error:
            raise TransportError(
                f"MPI refuses to receive from rank {peer}: {error}", rank=self.rank, peer=peer
            ) from error
        sizes = [part.nbytes for part in parts]
        return _MpiRequest(pieces, sizes, self._mpi.Status(), memory, self._mpi.Exception, peer)

    def wait(self, request: Request, what: str) -> None:
        assert isinstance(request, _MpiRequest)
        self._waits = (what, request.peer)
        try:
            if not self._waiter.wait(request.test, self._reports.arrived):
                raise self._late(what, request.peer)
        finally:
            self._waits = ("", -1)

    def _late(self, what: str, peer: int) -> TransportTimeoutError:
        """The error of a wait that this rank gives up, with what all ranks told that wait too."""
        if self._reports.found:
            text = f"rank {self.rank} waits for {what}, and another rank waited longer than comm.timeout_s"
        else:
            text = f"rank {self.rank} waited {self._waiter.timeout_s:g} s (comm.timeout_s) for {what}"
        mine = self.standing(look=True)
        _log.error("%s", mine.line())
        found = self._reports.exchange(mine)
        error = TransportTimeoutError(text, rank=self.rank, peer=peer, message=what)
        if min(found) == self.rank:
            error.add_note(report_text(found, self.size))
        else:
            error.told_by = min(found)
        return error

    def describe_by(self, place_of: PlaceOf) -> None:
        self._place_of = place_of

    def standing(self, look: bool = False) -> Standing:
        return Standing(self.rank, self._place_of(look), *self._waits)

    def configure(self, *, timeout_s: float, wait: str) -> None:
        self._waiter = Waiter(wait, self.local_size, timeout_s)

    def abort(self, code: int) -> NoReturn:
        try:  # whatever comes up, a closed pipe or another signal, the job ends
            sys.stdout.flush()
            sys.stderr.flush()
            time.sleep(OUTPUT_PASSES_WITHIN_S)
        finally:
            self._mpi.COMM_WORLD.Abort(code)
            os._exit(code)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._comm.Barrier()
            self._comm.Free()
            if not self._mpi.Is_finalized():
                self._mpi.Finalize()
        except self._mpi.Exception as error:
            raise TransportError(f"MPI does not end: {error}", rank=self.rank) from error


def _pieces(memory: Memory) -> list[Memory]:
    if memory.nbytes <= MAX_PIECE_BYTES:
        return [memory]
    return [memory[start : start + MAX_PIECE_BYTES] for start in range(0, memory.nbytes, MAX_PIECE_BYTES)]


def open_mpi_world() -> MpiTransport:
    """Start MPI and duplicate its world communicator. Collective.

    ``MPI_Finalize`` is left to ``close``: left to the interpreter's exit, it would block for ever on a rank that ends
    early by an exception, with all other ranks waiting for it.
    """
    try:
        import mpi4py
    except ImportError as error:
        raise MissingDependencyError(
            f"mpi4py and an MPI library are needed to train ({error}). Install both with: pip install "
            "'mpipipe[train,mpi]'"
        ) from error
    mpi4py.rc.finalize = False
    mpi4py.rc.thread_level = "serialized"
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        raise MissingDependencyError(
            f"mpi4py finds no MPI library ({error}). Load your cluster's MPI module, or: pip install 'mpipipe[mpi]'"
        ) from error
    transport = MpiTransport(MPI)
    check_world(transport.size)
    return transport


def end_unopened(error: BaseException, tell: Callable[[], int]) -> int:
    """Tell of an ``error`` of ``open_mpi_world`` and end the launch; the code to exit with.

    ``tell`` reports the error and returns that code. The launcher's first process tells it for all. Another one that is
    still there after a while is not one of all (one node lacks MPI, say): it tells its own, with a note of where it is,
    and ends the others, which wait for it in ``MPI_Init``.
    """
    found = environment.launcher()
    if found.rank:
        time.sleep(environment.FIRST_RANK_TELLS_WITHIN_S)
        if isinstance(error, LauncherMismatchError):  # never on one process alone
            return error.exit_code
        error.add_note(f"This is rank {found.rank}, on {environment.node_name()}.")
    code = tell()
    time.sleep(environment.OUTPUT_PASSES_WITHIN_S)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() > 1:
        mpi.COMM_WORLD.Abort(code)
    environment.end_launch(code)
    return code
