"""What the launcher and the operating system give this process: world size, ranks on the node, cores, threads,
versions.

Reads environment variables and asks the kernel; starts no MPI. The variables: Open MPI's mpirun sets
``OMPI_COMM_WORLD_*``; hydra (MPICH, Intel MPI, MVAPICH2) and ``srun --mpi=pmi2`` set ``PMI_RANK`` and ``PMI_SIZE``,
hydra also ``MPI_LOCALRANKID`` and ``MPI_LOCALNRANKS``; Cray's PALS sets ``PALS_*``. SLURM's own variables come last and
count only in a job step: under a mpirun inside a batch job every rank inherits those of the batch script or of mpirun's
daemon.
"""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath

from mpipipe.errors import LauncherMismatchError

OUTPUT_PASSES_WITHIN_S = 0.5
"""Launchers drop what they have not passed on when a job ends: without a pause, the report of a failure is lost at
times.
"""

LAUNCHER_ANSWERS_WITHIN_S = 2.0
"""A launcher that says nothing to a greeting for so long does not speak PMI-1."""

FIRST_RANK_TELLS_WITHIN_S = 5.0
"""A fault that all ranks have is told by rank 0 within this time, start-up of the slowest node included."""


@dataclass(frozen=True)
class LauncherInfo:
    """What the launcher says. ``None``: it does not say.

    ``name``: the launcher in words, ``"none"`` for a process that nothing launched. ``expected_size``: processes
    started together; ``rank``: this one's number among them; ``local_rank`` and ``ranks_on_node``: the same on this
    node.
    """

    name: str
    expected_size: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    ranks_on_node: int | None = None


TORCHRUN = "torchrun"
"""It starts processes that MPI does not know of: each would be a run of its own."""

# Name, then the variables of size, rank, local rank, ranks on this node; the first launcher whose size and rank are set
# counts.
_LAUNCHERS = (
    (
        "Open MPI mpirun",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("MPICH mpiexec (hydra)", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PALS mpiexec", "PALS_SIZE", "PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    (TORCHRUN, "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
)


def launcher(environ: Mapping[str, str] | None = None) -> LauncherInfo:
    """The launcher of this process, from ``environ`` (default: the process's own environment)."""
    given = os.environ if environ is None else environ
    in_step = "SLURM_STEP_ID" in given and "SLURM_PROCID" in given
    for name, size, rank, local_rank, local_size in _LAUNCHERS:
        expected, number = _number(given, size), _number(given, rank)
        if expected is None or number is None or (name == TORCHRUN and "TORCHELASTIC_RUN_ID" not in given):
            continue
        on_node = (_number(given, local_rank), _number(given, local_size))
        if size == "PMI_SIZE" and on_node[0] is None:
            by_srun = in_step and number == _number(given, "SLURM_PROCID") and expected == _slurm_size(given)
            name = "SLURM srun (PMI)" if by_srun else "a PMI launcher"
            on_node = _slurm_on_node(given) if by_srun else on_node
        return LauncherInfo(name, expected, number, *on_node)
    if in_step:
        name = "SLURM srun" + (" (PMIx)" if "PMIX_RANK" in given else "")
        return LauncherInfo(name, _slurm_size(given), _number(given, "SLURM_PROCID"), *_slurm_on_node(given))
    if "PMIX_RANK" in given:
        return LauncherInfo("a PMIx launcher", rank=_number(given, "PMIX_RANK"))
    return LauncherInfo("none")


def check_world(size: int, environ: Mapping[str, str] | None = None) -> None:
    """Raise LauncherMismatchError if the launcher started several processes and MPI sees a world of ``size`` 1."""
    found = launcher(environ)
    if size == 1 and found.expected_size is not None and found.expected_size > 1:
        if found.name == TORCHRUN:
            raise LauncherMismatchError(
                f"torchrun started {found.expected_size} processes, and it starts no MPI ranks: each would be a run of "
                f"its own. Start them with: mpirun -n {found.expected_size} python SCRIPT, or with srun"
            )
        raise LauncherMismatchError(
            f"{found.name} started {found.expected_size} processes, and MPI sees a world of size 1 in each of them: "
            "launcher and MPI library do not belong together. Use the mpirun or mpiexec of the MPI library that mpi4py "
            "loads ('mpipipe doctor' names it), or with SLURM the --mpi type that it understands: MPICH takes pmi2"
        )


def end_launch(code: int, environ: Mapping[str, str] | None = None) -> None:
    """Ask a PMI launcher to end every process of the launch, exit code ``code``, from one in which MPI has not started.

    hydra takes no notice of such a process's exit, nor does SLURM without ``--kill-on-bad-exit``, and the others wait
    for it in ``MPI_Init`` for ever. The words are those of PMI-1's wire protocol, on the open socket that the launcher
    names in ``PMI_FD``; the greeting goes alone, since SLURM takes what comes with it for a part of it. Other launchers
    end a launch at the first exit code that is not 0 by themselves: for them it does nothing.
    """
    channel = _number(os.environ if environ is None else environ, "PMI_FD")
    if channel is None:
        return
    with suppress(OSError), socket.socket(fileno=os.dup(channel)) as to_launcher:  # OSError too for what is no socket
        to_launcher.settimeout(LAUNCHER_ANSWERS_WITHIN_S)
        to_launcher.sendall(b"cmd=init pmi_version=1 pmi_subversion=1\n")
        with suppress(TimeoutError):
            to_launcher.recv(1024)
        to_launcher.sendall(b"cmd=abort exitcode=%d\n" % code)
        with suppress(TimeoutError):
            to_launcher.recv(1024)  # the launcher ends this process meanwhile


def node_name(environ: Mapping[str, str] | None = None) -> str:
    """The node's name; SLURM's, where it gives one (several of its nodes can be one machine)."""
    given = os.environ if environ is None else environ
    return given.get("SLURMD_NODENAME") or platform.node()


def affinity() -> set[int]:
    """Numbers of the cores that this process is bound to; those of the node where it is not bound."""
    return os.sched_getaffinity(0)


def available_cores() -> int:
    """Cores that this process may keep busy, at least 1: those it is bound to, as far as its cgroup's quota lets it."""
    return cores_of([affinity()])


def cores_of(bindings: Iterable[Collection[int]]) -> int:
    """Cores that processes of one node with these bindings may keep busy together, at least 1. A container's quota
    holds for all of its processes.
    """
    together = len(set().union(*bindings))
    quota = cpu_quota()
    return together if quota is None else max(1, min(together, int(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the kernel grants this process's cgroup and those above it; None without a limit."""
    quotas = []
    for folder in _groups(root, "cpu"):
        v1 = f"{_text(folder / 'cpu.cfs_quota_us')} {_text(folder / 'cpu.cfs_period_us')}"
        for text in (_text(folder / "cpu.max"), v1):
            match = re.fullmatch(r"([1-9][0-9]{0,12}) ([1-9][0-9]{0,12})", text, re.ASCII)
            if match is not None:
                quotas.append(int(match[1]) / int(match[2]))
    return min(quotas, default=None)


def _node_cores() -> int:
    """Cores of the node, as far as a quota of this process's container lets it have them."""
    return cores_of([range(os.cpu_count() or available_cores())])


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's cgroup for a controller and of those above it, of cgroup v2 and v1. In a container
    the files of its own group often lie at the top.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            group = PurePosixPath(path.lstrip("/"))
            for folder in (group, *group.parents):
                yield root / "sys/fs/cgroup" / controllers / folder


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _are_bound(ranks_on_node: int, cores: int, node_cores: int) -> bool:
    """Whether the launcher has given each rank cores of its own: then all that the ranks may use fit into the node."""
    return cores * ranks_on_node <= node_cores


def has_core_of_its_own(ranks_on_node: int, *, cores: int | None = None, node_cores: int | None = None) -> bool:
    """Whether every rank of the node can keep a core busy without taking it from another one. ``cores``: those that
    this process may use; ``node_cores``: those of the node.
    """
    mine = available_cores() if cores is None else cores
    total = _node_cores() if node_cores is None else node_cores
    return ranks_on_node <= mine or _are_bound(ranks_on_node, mine, total)


def threads_per_rank(
    ranks_on_node: int,
    *,
    cores: int | None = None,
    node_cores: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Threads that one rank should compute with, at least 1.

    ``OMP_NUM_THREADS`` where it is set. Else the cores that the process may use, shared between the ranks on the node,
    unless the launcher has bound each rank to cores of its own (then ``cores`` times ``ranks_on_node`` fit into
    ``node_cores``).
    """
    given = os.environ if environ is None else environ
    asked = _number(given, "OMP_NUM_THREADS")
    if asked:
        return asked
    mine = available_cores() if cores is None else cores
    total = _node_cores() if node_cores is None else node_cores
    return max(1, mine if _are_bound(ranks_on_node, mine, total) else mine // max(1, ranks_on_node))


def software_versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that mpipipe uses, without importing them; None for one that is not
    installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("numpy", "h5py", "pydantic", "typer", "rich", "matplotlib", "xxhash", "torch", "mpi4py"):
        versions[package] = _version(package)
    found = (_version(name) for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy"))
    versions["cupy"] = next((version for version in found if version), None)
    return versions


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _number(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name, "")
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) else None


def _slurm_size(given: Mapping[str, str]) -> int | None:
    return _number(given, "SLURM_STEP_NUM_TASKS") or _number(given, "SLURM_NTASKS")


def _slurm_on_node(given: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Local rank and ranks on this node of a job step; tasks per node look like ``2(x3),1``."""
    counts: list[int] = []
    for part in given.get("SLURM_STEP_TASKS_PER_NODE", given.get("SLURM_TASKS_PER_NODE", "")).split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part.strip(), re.ASCII)
        if match is None:
            counts = []
            break
        counts.extend([int(match[1])] * int(match[2] or 1))
    node = _number(given, "SLURM_NODEID")
    here = counts[node] if node is not None and node < len(counts) else None
    return _number(given, "SLURM_LOCALID"), here
