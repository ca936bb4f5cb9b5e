"""``mpipipe doctor``: what this machine and this launcher give, a verdict a line."""

from __future__ import annotations

import fcntl
import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mpipipe import __version__, environment
from mpipipe.cli.doctor_gpu import device_nodes, devices, gpu_verdicts
from mpipipe.cli.errors import EXIT_ENVIRONMENT, EXIT_FAILURE, message
from mpipipe.cli.options import Json
from mpipipe.cli.output import print_json
from mpipipe.cli.verdict import Level, Verdict
from mpipipe.errors import MpipipeError
from mpipipe.units import counted

if TYPE_CHECKING:
    from mpipipe.transport import Transport


def add_to(app: typer.Typer) -> None:
    """Put the verb into the tree."""
    app.command()(doctor)


def doctor(as_json: Json = False) -> None:
    """Say what this machine and launcher give."""
    found: list[Verdict] = []
    first = environment.launcher().rank in (None, 0)
    if first:
        for verdict in local_verdicts(Path.cwd()):
            _add(found, verdict, as_json)
    transport = _open(found, as_json)
    if transport is not None:
        _ask_all(transport, found, first, as_json)
    if first and as_json and transport is not None:
        _print_all(found)
    raise typer.Exit(_code(found))


def _add(found: list[Verdict], verdict: Verdict, as_json: bool) -> None:
    found.append(verdict)
    if not as_json:
        print(f"{verdict.level:8s}{verdict.subject}: {verdict.text}", flush=True)


def _code(found: list[Verdict]) -> int:
    return EXIT_ENVIRONMENT if any(verdict.level == "wrong" for verdict in found) else 0


def _print_all(found: list[Verdict]) -> None:
    print_json({"ok": not _code(found), "verdicts": [asdict(verdict) for verdict in found]})
    sys.stdout.flush()


def local_verdicts(folder: Path) -> Iterator[Verdict]:
    """What one process can tell without MPI; ``folder`` is where file locks are tried."""
    versions = environment.software_versions()
    yield Verdict("Python", "ok", f"{versions['python']}")
    yield Verdict("mpipipe", "ok", __version__)
    for package in ("numpy", "h5py", "pydantic"):
        yield _package(package, versions[package], "pip install mpipipe")
    yield _package("torch", versions["torch"], "pip install 'mpipipe[train]'")
    yield _package("mpi4py", versions["mpi4py"], "pip install 'mpipipe[train,mpi]'")
    yield devices(versions["cupy"], device_nodes())
    yield _cores()
    yield _locks(folder)


def _package(name: str, version: str | None, install: str) -> Verdict:
    """Whether a package is there and can be loaded. mpi4py is tried later, with MPI; h5py is loaded through our own
    formats."""
    optional = name in ("torch", "mpi4py")
    if version is None:
        return Verdict(name, "missing" if optional else "wrong", f"not installed: {install}")
    text = version
    try:
        if name == "h5py":
            hdf5 = importlib.import_module("mpipipe.formats.hdf5")
            text += f" (HDF5 {hdf5.library_version()})"
        elif name != "mpi4py":
            importlib.import_module(name)
    except Exception as error:
        return Verdict(name, "wrong", f"{version} can't be loaded: {type(error).__name__}: {error}")
    return Verdict(name, "ok", text)


def _cores() -> Verdict:
    cores, total = environment.available_cores(), os.cpu_count()
    ranks = environment.launcher().ranks_on_node or 1
    threads = environment.threads_per_rank(ranks)
    level: Level = "warning" if ranks > cores and cores == total else "ok"
    text = (
        f"this process may use {cores} of {total}; {counted(ranks, 'rank')} on this node, "
        f"{counted(threads, 'thread')} a rank"
    )
    return Verdict("cores", level, text + (": more ranks than cores" if level == "warning" else ""))


def _locks(folder: Path) -> Verdict:
    """Try the lock that HDF5 asks for."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return Verdict(
            "file locks", "warning", f"{folder}: {error.strerror or error}; files are opened without locks there"
        )
    return Verdict("file locks", "ok", f"work in {folder}")


def _open(found: list[Verdict], as_json: bool) -> Transport | None:
    """The world of this launch, or None with the reason told, and then, with --json, all verdicts of this process.

    Several processes that were launched together end together: some of them may be waiting in ``MPI_Init``.
    """
    from mpipipe.transport import open_world
    from mpipipe.transport.mpi import end_unopened

    launcher = environment.launcher()
    try:
        return open_world()
    except BaseException as error:
        launched, reason = launcher.rank is not None, error
        if not isinstance(error, Exception) and not launched:
            raise

    def tell() -> int:
        level: Level = "missing" if isinstance(reason, ImportError) and not launched else "wrong"
        text = message(reason).replace("\n", " ")
        text = text if isinstance(reason, MpipipeError) else f"{type(reason).__name__}: {text}"
        _add(found, Verdict("MPI", level, f"launcher: {launcher.name}; {text}"), as_json)
        if as_json:
            _print_all(found)
        return _code(found)

    if launched:
        end_unopened(reason, tell)
        if not found:
            raise typer.Exit(EXIT_ENVIRONMENT)
    else:
        tell()
    return None


def _ask_all(transport: Transport, found: list[Verdict], first: bool, as_json: bool) -> None:
    """The verdicts of all ranks together. Collective; a rank that fails ends the others."""
    try:
        for verdict in chain(_world_verdicts(transport), gpu_verdicts(transport, as_json)):
            if first:
                _add(found, verdict, as_json)
        transport.close()
    except BaseException:
        if transport.size == 1:
            raise
        sys.stderr.write(f"rank {transport.rank} failed\n{traceback.format_exc()}")
        transport.abort(EXIT_FAILURE)


def _world_verdicts(transport: Transport) -> Iterator[Verdict]:
    """What all ranks know together. Collective."""
    from mpipipe.collectives import all_gather_objects

    mine: dict[str, Any] = {
        "node": environment.node_name(),
        "local_size": transport.local_size,
        "cores": environment.available_cores(),
        "threads": environment.threads_per_rank(transport.local_size),
        "library": transport.library,
    }
    ranks = all_gather_objects(transport, mine)
    yield Verdict("MPI", "ok", f"{' '.join(mine['library'].split())}; launcher: {environment.launcher().name}")
    libraries = {rank["library"] for rank in ranks}
    if len(libraries) > 1:
        yield Verdict("MPI", "wrong", f"ranks load different libraries: {', '.join(sorted(libraries))}")
    nodes: dict[str, int] = {}
    for rank in ranks:
        nodes[rank["node"]] = nodes.get(rank["node"], 0) + 1
    per_node = ", ".join(f"{count} on {node}" for node, count in nodes.items())
    yield Verdict("ranks", "ok", f"{transport.size}: {per_node}")
    threads = sorted({rank["threads"] for rank in ranks})
    level: Level = "ok" if len(threads) == 1 else "warning"
    yield Verdict("threads", level, f"{' or '.join(str(count) for count in threads)} a rank")
