"""The MPI twin: ``Isend`` and ``Irecv`` on a private communicator. The one file that imports mpi4py."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from numpy import ndarray

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
from mpipipe.transport import awareness
from mpipipe.transport.protocol import REPORT_TAG, Request
from mpipipe.transport.standing import Place, PlaceOf, Standing, report_text
from mpipipe.transport.waiting import Pace, Waiter

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpipipe.device import DeviceMemory, Memory

_log = logging.getLogger(__name__)

REPORTS_WITHIN_S = 2.0
"""Once a wait has run out, the ranks that wait too tell where they are within this time."""

_REPORTS_NAP_S = 2e-3

MAX_PIECE_BYTES = 1 << 30
"""A longer message goes in pieces: Open MPI 5 refuses more than 2**31 - 1 elements in one call."""

DEFAULT_TIMEOUT_S = 600.0

_POLL_EVERY_NS = 1_000_000
_POLL_LONGEST_NS = 5_000_000
_LEAST_PATIENCE_NS = 3_000
_MOST_PATIENCE_NS = 200_000
"""A poll calls MPI at most every millisecond, and goes on while that moves data and for a while after: through shared
memory without single copy, a call moves a few 10 KB, and then the other rank must make room. The while is four times as
long after each call that moved data, up to 200 us, and half as long after each poll that moved none, down to 3 us: a
call may take long for another reason, as that another rank had the core.
"""

_NO_WAIT = ("", -1)


class _Open:
    """One send, or one receive of exactly ``nbytes`` bytes, under way. MPI's request holds the memory till the end.

    ``status``: for a receive, any one of the rank's own thread: it is read right after the test that fills it. None for
    a send and for a receive that is complete, whose test finds MPI's null request, which is always so.
    """

    __slots__ = ("_nbytes", "_request", "_status", "peer")

    def __init__(self, request: MPI.Request, peer: int, nbytes: int, status: MPI.Status | None) -> None:
        self._request = request
        self.peer = peer
        self._nbytes = nbytes
        self._status = status

    def test(self) -> bool:
        status = self._status
        try:
            if status is None:
                return self._request.Test()
            if not self._request.Test(status):
                return False
        except _mpi_error() as error:
            raise _explain(error, self._nbytes) from error
        self._status = None
        if status.count != self._nbytes:
            raise MessageMismatchError(
                f"a message of {status.count} bytes arrived where {self._nbytes} bytes were expected"
            )
        return True


class _OpenPieces:
    """A long message in pieces; complete when all of them are."""

    __slots__ = ("_pieces", "peer")

    def __init__(self, pieces: list[Request], peer: int) -> None:
        self._pieces = pieces
        self.peer = peer

    def test(self) -> bool:
        while self._pieces:
            if not self._pieces[-1].test():
                return False
            self._pieces.pop()
        return True


def _mpi_error() -> type[Exception]:
    """The class of MPI's own errors. Looked up only when something was raised."""
    kind: type[Exception] = sys.modules["mpi4py.MPI"].Exception
    return kind


def _explain(error: Exception, expected: int) -> TransportError:
    if "truncat" in str(error).lower():
        return MessageMismatchError(f"a longer message arrived where {expected} bytes were expected ({error})")
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
        _check_tags(mpi.COMM_WORLD.Get_attr(mpi.TAG_UB))
        self._mpi = mpi
        self._comm: MPI.Intracomm = mpi.COMM_WORLD.Dup()
        self._comm.Set_errhandler(mpi.ERRORS_RETURN)
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()
        node = self._comm.Split_type(mpi.COMM_TYPE_SHARED)
        self.local_size: int = node.Get_size()
        self.local_rank: int = node.Get_rank()
        cores = environment.cores_of(node.allgather(environment.affinity()))
        node.Free()
        self._own_core = environment.has_core_of_its_own(self.local_size, cores=cores, node_cores=cores)
        self.library: str = mpi.Get_library_version().split("\n")[0].strip().rstrip("\0")
        self._waiter = Waiter("auto", self._own_core, DEFAULT_TIMEOUT_S)
        self._closed = False
        self._waits = _NO_WAIT
        self._place_of: PlaceOf = lambda look: Place()
        self._reports = _Reports(mpi, self._comm)
        self._byte = mpi.BYTE
        self._any_source = mpi.ANY_SOURCE
        self._isend, self._irecv, self._iprobe = self._comm.Isend, self._comm.Irecv, self._comm.Iprobe
        self._status = mpi.Status()
        self._pace = Pace()
        self._polled_ns, self._patience_ns = 0, _LEAST_PATIENCE_NS

    def isend(self, memory: Memory, peer: int, tag: int) -> Request:
        if memory.nbytes > MAX_PIECE_BYTES:
            return _OpenPieces([self.isend(part, peer, tag) for part in _pieces(memory)], peer)
        message = memory if isinstance(memory, ndarray) else self._by_address(memory)
        try:
            return _Open(self._isend((message, self._byte), peer, tag), peer, 0, None)
        except _mpi_error() as error:
            raise TransportError(f"MPI refuses to send to rank {peer}: {error}", rank=self.rank, peer=peer) from error

    def irecv(self, memory: Memory, peer: int, tag: int) -> Request:
        nbytes = memory.nbytes
        if nbytes > MAX_PIECE_BYTES:
            return _OpenPieces([self.irecv(part, peer, tag) for part in _pieces(memory)], peer)
        message = memory if isinstance(memory, ndarray) else self._by_address(memory)
        try:
            return _Open(self._irecv((message, self._byte), peer, tag), peer, nbytes, self._status)
        except _mpi_error() as error:
            raise TransportError(
                f"MPI refuses to receive from rank {peer}: {error}", rank=self.rank, peer=peer
            ) from error

    def _by_address(self, memory: DeviceMemory) -> object:
        """What MPI is given for memory that NumPy has no array for, made once and kept there."""
        message = memory.message
        if message is None:
            message = memory.message = self._mpi.buffer.fromaddress(memory.address, memory.nbytes)
        return message

    def cuda_findings(self) -> list[awareness.Finding]:
        kinds: str | None = None
        with suppress(self._mpi.Exception):
            info = self._mpi.COMM_WORLD.Get_info()
            kinds = info.Get(awareness.KINDS_KEY)
            info.Free()
        return awareness.ask(self.library, kinds)

    def poll(self) -> None:
        start = time.perf_counter_ns()
        if start - self._polled_ns >= _POLL_EVERY_NS:
            try:
                self._move_data(start)
            except _mpi_error() as error:
                raise TransportError(f"MPI reports: {error}", rank=self.rank) from error

    def _move_data(self, start: int) -> None:
        clock, probe, source = time.perf_counter_ns, self._iprobe, self._any_source
        if probe(source, REPORT_TAG) and self._reports.arrived():
            raise self._late("", -1)
        first = moved = now = clock()
        while now - moved < self._patience_ns and now - start < _POLL_LONGEST_NS:
            before = now
            probe(source, REPORT_TAG)
            now = clock()
            if self._pace.moved_data(now - before):
                moved = now
                self._patience_ns = min(self._patience_ns * 4, _MOST_PATIENCE_NS)
        if moved == first:
            self._patience_ns = max(self._patience_ns // 2, _LEAST_PATIENCE_NS)
        self._polled_ns = now

    def wait(self, request: Request, what: str) -> None:
        if request.test():
            return
        self._waits = (what, request.peer)
        try:
            if not self._waiter.wait(request.test, self._reports.arrived):
                raise self._late(what, request.peer)
        finally:
            self._waits = _NO_WAIT

    def _late(self, what: str, peer: int) -> TransportTimeoutError:
        """The error of a wait that this rank gives up, or of one that another gave up while this one computes
        (``what`` empty), with what all ranks told.
        """
        if not what:
            text = f"rank {self.rank} computes, and another rank waited longer than comm.timeout_s"
        elif self._reports.found:
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
        self._waiter = Waiter(wait, self._own_core, timeout_s)

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


def _check_tags(granted: int | None) -> None:
    """``granted``: the largest tag that the library takes; None where it does not say."""
    if granted is not None and granted < REPORT_TAG:
        raise SetupError(
            f"this MPI library allows tags up to {granted}, and mpipipe needs {REPORT_TAG}; the MPI standard grants "
            "32767. Use another MPI library, or another network transport of this one"
        )


def _pieces(memory: Memory) -> list[Memory]:
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
