"""Launcher variables as launchers set them, worlds that do not fit, threads per rank, versions."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from mpipipe.environment import (
    LauncherInfo,
    available_cores,
    check_world,
    end_launch,
    launcher,
    node_name,
    software_versions,
    threads_per_rank,
)
from mpipipe.errors import LauncherMismatchError, SetupError

OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURMD_NODENAME": "n2",
}
ELASTIC = {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
# What a batch script sees, and every rank of a mpirun inside it: the rank and local rank are those of the script or the
# daemon.
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "n1"}
DAEMON = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, LauncherInfo("none")),
        (OPEN_MPI, LauncherInfo("Open MPI mpirun", 4, 3, 1, 2)),
        (HYDRA, LauncherInfo("MPICH mpiexec (hydra)", 4, 2, 0, 2)),
        (STEP, LauncherInfo("SLURM srun", 4, 2, 0, 2)),
        ({**STEP, "PMIX_RANK": "2"}, LauncherInfo("SLURM srun (PMIx)", 4, 2, 0, 2)),
        ({**STEP, "PMI_SIZE": "4", "PMI_RANK": "2"}, LauncherInfo("SLURM srun (PMI)", 4, 2, 0, 2)),
        (BATCH, LauncherInfo("none")),
        ({**DAEMON, **OPEN_MPI}, LauncherInfo("Open MPI mpirun", 4, 3, 1, 2)),
        ({**DAEMON, **HYDRA}, LauncherInfo("MPICH mpiexec (hydra)", 4, 2, 0, 2)),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, LauncherInfo("a PMI launcher", 2, 1)),
        ({"PMIX_RANK": "1"}, LauncherInfo("a PMIx launcher", rank=1)),
        ({"PMI_SIZE": "many", "PMI_RANK": "1"}, LauncherInfo("none")),
        (ELASTIC, LauncherInfo("torchrun", 4, 1, 1, 2)),
        ({**ELASTIC, **HYDRA}, LauncherInfo("MPICH mpiexec (hydra)", 4, 2, 0, 2)),
        ({"WORLD_SIZE": "4", "RANK": "1"}, LauncherInfo("none")),  # as some job scripts export them
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "3,1(x2)", "SLURM_NODEID": "2"}, LauncherInfo("SLURM srun", 4, 2, 0, 1)),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "odd"}, LauncherInfo("SLURM srun", 4, 2, 0, None)),
    ],
)
def test_launcher(environ, expected):
    assert launcher(environ) == expected


def test_torchrun_starts_no_ranks():
    with pytest.raises(LauncherMismatchError, match=r"torchrun started 4 processes, .*: mpirun -n 4 python SCRIPT"):
        check_world(1, ELASTIC)


@pytest.mark.parametrize("environ", [OPEN_MPI, HYDRA, STEP])
def test_several_processes_that_are_each_alone(environ):
    with pytest.raises(LauncherMismatchError) as caught:
        check_world(1, environ)
    assert isinstance(caught.value, SetupError)
    assert launcher(environ).name in str(caught.value)
    assert "started 4 processes" in str(caught.value)


@pytest.mark.parametrize(
    ("size", "environ"), [(4, OPEN_MPI), (1, {}), (1, BATCH), (8, STEP), (1, {**HYDRA, "PMI_SIZE": "1"})]
)
def test_worlds_that_fit(size, environ):
    check_world(size, environ)


@pytest.mark.parametrize(
    ("ranks", "cores", "node_cores", "environ", "threads"),
    [
        (1, 8, 8, {}, 8),
        (4, 8, 8, {}, 2),
        (4, 2, 8, {}, 2),  # bound: 4 x 2 cores fit into the node
        (4, 2, 2, {}, 1),  # more ranks than cores
        (3, 8, 8, {}, 2),
        (4, 8, 8, {"OMP_NUM_THREADS": "3"}, 3),
        (4, 8, 8, {"OMP_NUM_THREADS": "0"}, 2),
        (4, 8, 8, {"OMP_NUM_THREADS": "4,2"}, 2),
    ],
)
def test_threads_per_rank(ranks, cores, node_cores, environ, threads):
    assert threads_per_rank(ranks, cores=cores, node_cores=node_cores, environ=environ) == threads


def test_this_machine():
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
    assert threads_per_rank(1, environ={}) == available_cores()
    assert node_name({"SLURMD_NODENAME": "n7"}) == "n7"
    assert node_name({})


def test_versions():
    versions = software_versions()
    assert versions["numpy"]
    assert versions["h5py"]
    assert set(versions) >= {"python", "torch", "mpi4py", "cupy"}


def test_the_greeting_to_a_pmi_launcher_goes_alone():
    """SLURM reads 64 bytes for it: an abort that came along would be lost."""
    reader, writer = socket.socketpair()
    heard = []

    def launcher_side() -> None:
        heard.append(reader.recv(64))
        reader.sendall(b"cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n")
        heard.append(reader.recv(64))
        reader.close()

    thread = threading.Thread(target=launcher_side)
    thread.start()
    with writer:
        end_launch(3, {"PMI_FD": str(writer.fileno())})
        thread.join()
    assert heard == [b"cmd=init pmi_version=1 pmi_subversion=1\n", b"cmd=abort exitcode=3\n"]


@pytest.mark.parametrize("environ", [{}, {"PMI_FD": "-1"}, {"PMI_FD": "999999"}, {"PMI_FD": "no"}])
def test_without_a_pmi_launcher_nothing_is_asked(environ):
    end_launch(3, environ)
