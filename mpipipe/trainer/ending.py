"""How the job of a user's own script ends when a rank fails: before MPI has begun, and after."""

from __future__ import annotations

import os
import sys
import time
import traceback
from typing import NoReturn

from mpipipe import environment
from mpipipe.errors import MpipipeError, SetupError, TransportTimeoutError
from mpipipe.transport import Transport, open_world
from mpipipe.transport.mpi import end_unopened

_INTERRUPT_TOLD_WITHIN_S = 1.0


def open_or_end() -> Transport:
    """Every rank of the MPI launch.

    A process that something launched together with others tells why it can't, and ends them all with itself: they may
    be waiting for it in ``MPI_Init``. A process on its own raises.
    """
    try:
        return open_world()
    except BaseException as error:
        found = environment.launcher()
        if found.rank is None or found.expected_size == 1:
            raise
        told = error  # the name ``error`` ends with this block
        code = end_unopened(told, lambda: _tell(told))
        sys.stdout.flush()
        os._exit(code)


def _tell(error: BaseException) -> int:
    if isinstance(error, SetupError):
        lines = [str(error), *getattr(error, "__notes__", ())]
        sys.stderr.write("mpipipe: " + "\n".join(lines) + "\n")
        return error.exit_code
    sys.stderr.write("mpipipe: MPI can't be started, the job ends\n" + "".join(traceback.format_exception(error)))
    return 1


def end_job(transport: Transport, error: BaseException) -> NoReturn:
    """End every rank of the launch; the others may be waiting for this one.

    What all ranks see alike is told by rank 0 alone: the others give it the time to do so; a wait that ran out by the
    lowest rank that waits. An interrupt takes a line.
    """
    alike = isinstance(error, MpipipeError) and error.seen_alike
    told_elsewhere = isinstance(error, TransportTimeoutError) and error.told_by is not None
    interrupted = isinstance(error, KeyboardInterrupt)
    code = error.exit_code if isinstance(error, MpipipeError) and alike else 1
    try:
        if told_elsewhere or (transport.rank != 0 and (alike or interrupted)):
            time.sleep(_INTERRUPT_TOLD_WITHIN_S if interrupted else environment.FIRST_RANK_TELLS_WITHIN_S)
        how = "was interrupted" if interrupted else "failed"
        story = "" if interrupted else "".join(traceback.format_exception(error))
        sys.stderr.write(f"mpipipe: rank {transport.rank} {how}, the job ends\n{story}")
    finally:
        transport.abort(code)
