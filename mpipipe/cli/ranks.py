"""Running a verb on every rank of an MPI launch: what all agree on, what is printed once, and how the job ends when one
rank fails.

A fault that all ranks see alike (a wrong run file) is gathered, printed by rank 0, and every rank returns the same
code. Anything else on one rank is told by that rank, which then ends the job: the others may be waiting for its
messages.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from mpipipe import environment
from mpipipe.cli.errors import (
    EXIT_DONE,
    EXIT_FAILURE,
    EXIT_STOPPED,
    error_object,
    exit_code,
    report,
)
from mpipipe.environment import OUTPUT_PASSES_WITHIN_S
from mpipipe.errors import ConfigError, MissingDependencyError, MpipipeError, SetupError, TransportTimeoutError

if TYPE_CHECKING:
    from mpipipe.config import Config
    from mpipipe.transport import Transport

AGREE_TIMEOUT_S = 20.0
"""Ranks that see a fault alike meet within this time; a rank that waits for the others longer ends the job."""


_INTERRUPT_TOLD_WITHIN_S = 1.0


def on_ranks(
    prepare: Callable[[int], Config],
    work: Callable[[Config, Transport], int],
    *,
    as_json: bool,
    open_world: Callable[[], Transport] | None = None,
) -> int:
    """Open the world, let all ranks agree on the config of ``prepare(num_ranks)``, run ``work`` and return the exit
    code.

    ``work`` returns the code, the same on all ranks. Does not return when a rank fails alone: the whole job ends with
    code 1.
    """
    try:
        transport = (open_world or _open_world)()
    except BaseException as error:
        if not isinstance(error, SetupError) and environment.launcher().rank is None:
            raise
        return _report_unopened(error, as_json)
    try:
        code = work(_agree(transport, prepare), transport)
        sys.stdout.flush()
        transport.close()
    except KeyboardInterrupt as error:
        _interrupted(transport, error)
    except MpipipeError as error:
        if not error.seen_alike:
            _fail(transport, error, as_json)
        code = _tell_once(transport, error, as_json)
    except BaseException as error:
        _fail(transport, error, as_json)
    if code not in (EXIT_DONE, EXIT_STOPPED):
        _leave_threads(code)
    return code


def _leave_threads(code: int) -> None:
    """A thread that lives on does not keep this process, and with it the launch, after a fault that all ranks saw."""
    current = threading.current_thread()
    others = [thread for thread in threading.enumerate() if thread is not current and not thread.daemon]
    if others and current is threading.main_thread():
        time.sleep(OUTPUT_PASSES_WITHIN_S)  # the other ranks leave first: some launchers kill them at the first code
        sys.stderr.flush()
        os._exit(code)


def _open_world() -> Transport:
    from mpipipe.transport import open_world

    return open_world()


def _need_torch() -> None:
    """After MPI has begun, so that a rank without torch can tell the others. Raises ``MissingDependencyError``."""
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise MissingDependencyError(f"this verb needs torch ({error}): pip install 'mpipipe[train]'") from error


def _agree(transport: Transport, prepare: Callable[[int], Config]) -> Config:
    """The config, if every rank has it and has the same. Raises the first rank's fault on all of them; what is none of
    our own errors, a bug, on its rank alone.
    """
    from mpipipe.collectives import agree, all_gather_objects

    prepared: Config | MpipipeError
    try:
        _need_torch()
        prepared = prepare(transport.size)
    except MpipipeError as error:
        prepared = error

    def result() -> Config:
        if isinstance(prepared, MpipipeError):
            raise prepared
        return prepared

    config = agree(transport, result)
    digests = all_gather_objects(transport, hashlib.sha256(config.to_toml().encode()).hexdigest())
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise ConfigError(
            f"rank {other} reads another run file than rank 0: all ranks need the same file and settings"
        )
    return config


def _tell_once(transport: Transport, error: MpipipeError, as_json: bool) -> int:
    """Tell a fault from rank 0, make sure that all ranks have met it, and close.

    A rank that is alone with it, against what its class says, tells it and ends the job. The others may be in any other
    exchange: the meeting has a tag of its own.
    """
    from mpipipe.collectives import all_gather_objects
    from mpipipe.transport import MEETING_TAG

    tells = transport.rank == 0
    if tells:
        report(error, as_json=as_json)
    try:
        transport.configure(timeout_s=AGREE_TIMEOUT_S, wait="auto")
        codes = all_gather_objects(transport, exit_code(error), tag=MEETING_TAG)
        transport.close()
    except BaseException:
        _fail(transport, error, as_json and not tells)
    return int(codes[0])


def _report_unopened(error: BaseException, as_json: bool) -> int:
    from mpipipe.transport.mpi import end_unopened

    return end_unopened(error, lambda: report(error, as_json=as_json))


def _fail(transport: Transport, error: BaseException, as_json: bool) -> NoReturn:
    if isinstance(error, TransportTimeoutError) and error.told_by is not None:
        time.sleep(environment.FIRST_RANK_TELLS_WITHIN_S)  # that rank tells it and ends the job
    if as_json:
        sys.stdout.write(json.dumps(error_object(error)) + "\n")
    _end_job(transport, f"rank {transport.rank} failed\n" + "".join(traceback.format_exception(error)))


def _interrupted(transport: Transport, error: KeyboardInterrupt) -> NoReturn:
    """Ctrl-C reaches every rank, and one line is enough: the others give rank 0 the time to tell and to end them."""
    try:
        if transport.rank != 0:
            time.sleep(_INTERRUPT_TOLD_WITHIN_S)
    finally:
        said = [f"rank {transport.rank} was interrupted", *getattr(error, "__notes__", ())]
        _end_job(transport, "; ".join(said) + "\n")


def _end_job(transport: Transport, text: str) -> NoReturn:
    """``text`` in one write, so that the lines of several ranks do not mix; then the end of every rank."""
    try:
        sys.stderr.write(text)
    finally:
        transport.abort(EXIT_FAILURE)
