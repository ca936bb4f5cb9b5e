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
from typing import TYPE_CHECKING, Any, NoReturn

from mpipipe import environment
from mpipipe.cli.errors import (
    EXIT_DONE,
    EXIT_FAILURE,
    EXIT_STOPPED,
    error_object,
    exit_code,
    message,
    report,
    show_text,
)
from mpipipe.environment import FIRST_RANK_TELLS_WITHIN_S, OUTPUT_PASSES_WITHIN_S
from mpipipe.errors import ConfigError, LauncherMismatchError, MissingDependencyError, MpipipeError, SetupError

if TYPE_CHECKING:
    from mpipipe.config import Config
    from mpipipe.transport import Transport

AGREE_TIMEOUT_S = 20.0
"""Ranks that see a fault alike meet within this time; a rank that waits for the others longer ends the job."""


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
    except SetupError as error:
        return _report_from_one_process(error, as_json)
    try:
        config = _agree(transport, prepare, as_json)
        code = config if isinstance(config, int) else work(config, transport)
        sys.stdout.flush()
        transport.close()
    except KeyboardInterrupt:
        _end_job(transport, f"rank {transport.rank} was interrupted\n")
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


def _agree(transport: Transport, prepare: Callable[[int], Config], as_json: bool) -> Config | int:
    """The config, if every rank has it and has the same; else the exit code, after rank 0 has told the first fault."""
    from mpipipe.collectives import all_gather_objects

    config: Config | None = None
    mine: dict[str, Any]
    try:
        _need_torch()
        config = prepare(transport.size)
        mine = {"code": 0, "digest": hashlib.sha256(config.to_toml().encode()).hexdigest()}
    except MpipipeError as error:
        mine = _as_found(error)
    everyone = all_gather_objects(transport, mine)
    first = next((found for found in everyone if found["code"]), None)
    if first is None and config is not None:
        other = next((rank for rank, found in enumerate(everyone) if found["digest"] != everyone[0]["digest"]), None)
        if other is None:
            return config
        first = _as_found(
            ConfigError(f"rank {other} reads another run file than rank 0: all ranks need the same file and settings")
        )
    assert first is not None
    if transport.rank == 0:
        _tell(first, as_json)
    return int(first["code"])


def _as_found(error: MpipipeError) -> dict[str, Any]:
    return {"code": exit_code(error), "text": message(error), "object": error_object(error)}


def _tell(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found["object"]), flush=True)
    else:
        show_text(found["text"])


def _tell_once(transport: Transport, error: MpipipeError, as_json: bool) -> int:
    """Make sure that all ranks have met a fault, tell it from rank 0, and close.

    A rank that is alone with it, against what its class says, ends the job.
    """
    from mpipipe.collectives import all_gather_objects

    try:
        transport.configure(timeout_s=AGREE_TIMEOUT_S, wait="auto")
        codes = all_gather_objects(transport, exit_code(error))
        if transport.rank == 0:
            report(error, as_json=as_json)
        transport.close()
    except BaseException:
        _fail(transport, error, as_json)
    return int(codes[0])


def _report_from_one_process(error: MpipipeError, as_json: bool) -> int:
    """Tell of a fault that came before MPI could count the ranks, and end the launch.

    The launcher's first process tells it for all. Another one that is still there after a while is not one of all (one
    node lacks MPI, say): it tells its own, and ends the others, which wait for it in ``MPI_Init``.
    """
    found = environment.launcher()
    if found.rank:
        time.sleep(FIRST_RANK_TELLS_WITHIN_S)
        if isinstance(error, LauncherMismatchError):  # never on one process alone
            return error.exit_code
        error.add_note(f"This is rank {found.rank}, on {environment.node_name()}.")
    code = report(error, as_json=as_json)
    time.sleep(OUTPUT_PASSES_WITHIN_S)
    environment.end_launch(code)
    return code


def _fail(transport: Transport, error: BaseException, as_json: bool) -> NoReturn:
    if as_json:
        sys.stdout.write(json.dumps(error_object(error)) + "\n")
    _end_job(transport, f"rank {transport.rank} failed\n" + "".join(traceback.format_exception(error)))


def _end_job(transport: Transport, text: str) -> NoReturn:
    """``text`` in one write, so that the lines of several ranks do not mix; then the end of every rank."""
    try:
        sys.stderr.write(text)
    finally:
        transport.abort(EXIT_FAILURE)
