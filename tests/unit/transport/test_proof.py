"""The proof that GPU memory arrives right: the choice of the path, the pattern, and launchers that end in every way."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.late import LateDriver

from mpipipe.device import Buffer, Device, HostDevice
from mpipipe.device.streams import StreamDevice
from mpipipe.errors import NotCudaAwareError, TransportError
from mpipipe.transport import Transport, run_ranks
from mpipipe.transport.awareness import OVERRIDE, Finding
from mpipipe.transport.proof import (
    ANSWER,
    PROOF_SIZES,
    MessagePath,
    Proof,
    choose_path,
    exchange_pattern,
    find_launcher,
    pattern,
    probe_environment,
    prove,
    wrong_arrivals,
)

pytestmark = pytest.mark.slow

YES, NO = Finding("a query", "yes", "the library does"), Finding("a query", "no", "the library does not")


@pytest.mark.parametrize(
    "asked, findings, proof, path, asks",
    [
        ("staged", [YES], True, "staged", False),
        ("cuda-aware", [NO], False, "cuda-aware", False),
        ("auto", [NO], True, "staged", False),
        ("auto", [], True, "staged", False),
        ("auto", [YES], True, "cuda-aware", True),
        ("auto", [YES], False, "staged", True),
        ("auto", [NO, Finding(OVERRIDE, "yes", "")], True, "cuda-aware", True),
        ("auto", [YES, Finding(OVERRIDE, "no", "")], True, "staged", False),
    ],
)
def test_which_path_is_taken(asked: str, findings: list[Finding], proof: bool, path: str, asks: bool) -> None:
    tried: list[None] = []

    def try_it() -> Proof:
        tried.append(None)
        return Proof(proof, "what was seen")

    found = choose_path(asked, findings, try_it)
    assert found.name == path
    assert (len(tried) == 1) is asks
    assert ("what was seen" in found.reason) is asks


def test_the_reason_says_who_said_what() -> None:
    assert choose_path("auto", [NO], lambda: Proof(True, "")) == MessagePath("staged", "the library does not")
    assert choose_path("staged", [], lambda: Proof(True, "")).reason == 'comm.path = "staged"'


# --- the pattern ---


def late(staged: bool) -> tuple[Device, LateDriver]:
    driver = LateDriver(3)
    return StreamDevice(driver, staged), driver


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["host", "aware", "staged"])
def test_a_right_pattern_is_right(kind: str, size: int) -> None:
    def work(transport: Transport) -> None:
        device, driver = (HostDevice(), None) if kind == "host" else late(staged=kind == "staged")
        exchange_pattern(transport, device)
        if driver is not None:
            driver.check()

    run_ranks(size, work)


class Flipping(HostDevice):
    """Sends something else than it is given: one bit of one byte, in messages of this many bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def outgoing(self, tensor: torch.Tensor) -> Buffer:
        if tensor.numel() == self.nbytes:
            tensor = tensor.clone()
            tensor[-1] ^= 1
        return super().outgoing(tensor)


@pytest.mark.parametrize("nbytes", PROOF_SIZES)
def test_one_wrong_bit_is_found_by_those_who_get_it(nbytes: int) -> None:
    """Of rank 1 of 4: both neighbours; and the exchange goes on to its end on all ranks."""

    def work(transport: Transport) -> list[str]:
        return wrong_arrivals(transport, Flipping(nbytes) if transport.rank == 1 else HostDevice())

    found = run_ranks(4, work)
    assert found == [[f"1 of {nbytes} bytes from rank 1"], [], [f"1 of {nbytes} bytes from rank 1"], []]


def test_a_message_that_brings_nothing_is_found() -> None:
    """The memory is as it was before: no pattern is left in it by chance."""

    class Lost(HostDevice):
        def receiving(self, buffer: Buffer) -> None:
            buffer.wire = np.empty(buffer.nbytes, dtype=np.uint8)  # and never copied to where it belongs

    found = run_ranks(2, lambda transport: wrong_arrivals(transport, Lost()))
    assert [len(wrong) for wrong in found] == [2 * len(PROOF_SIZES)] * 2


def test_the_error_names_the_way_out() -> None:
    with pytest.raises(NotCudaAwareError, match=r'1 of 8 bytes from rank [01].*comm\.path = "staged"') as caught:
        run_ranks(2, lambda transport: exchange_pattern(transport, Flipping(8)))
    assert caught.value.exit_code == 3
    assert caught.value.seen_alike


def test_what_mpi_refuses_is_the_same_error() -> None:
    class Refused(HostDevice):
        def receiving(self, buffer: Buffer) -> None:
            raise TransportError("MPI refuses to receive")

    with pytest.raises(NotCudaAwareError, match=r'did not arrive \(MPI refuses to receive\).*comm\.path = "staged"'):
        run_ranks(2, lambda transport: exchange_pattern(transport, Refused()))


def test_no_two_patterns_are_alike() -> None:
    found = {pattern(8, rank, turn).tobytes() for rank in range(8) for turn in range(10)}
    assert len(found) == 80


# --- launches ---


def launcher(folder: Path, *lines: str) -> str:
    """A program that stands for mpirun."""
    path = folder / "bin" / "mpirun"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(("#!/bin/sh", *lines)) + "\n")
    path.chmod(0o755)
    return str(folder / "lib" / "libmpi.so.40")


def answer(**fields: object) -> str:
    return f"echo '{ANSWER}{json.dumps(fields)}'"


@pytest.mark.parametrize(
    "lines, holds, text",
    [
        ([answer(right=True)], True, "proved by messages in a launch of its own"),
        (["echo noise", f"echo 'out: '; {answer(right=True)}", "echo noise"], True, "proved"),
        ([answer(right=True), "exit 1"], False, "crashed (exit code 1"),
        ([], False, "crashed (exit code 0)"),
        (["kill -SEGV $$"], False, "crashed (exit code -11)"),
        (["echo 'BAD TERMINATION: 139'; echo ====; exit 139"], False, "(exit code 139: BAD TERMINATION: 139)"),
        ([answer(error="a message arrived wrong"), "exit 4"], False, "not proved: a message arrived wrong"),
        ([answer(error="CuPy is missing"), answer(right=True)], False, "not proved: CuPy is missing"),
        ([f"echo '{ANSWER}no json'"], False, "crashed (exit code 0"),
        (["echo a signal 11; echo an error; echo FAQ; exit 139"], False, "(exit code 139: a signal 11)"),
        (["echo an error; echo; echo FAQ; exit 1"], False, "(exit code 1: an error)"),
        (["echo told >&2; exit 3"], False, "(exit code 3: told)"),
    ],
)
def test_how_a_launch_may_end(tmp_path: Path, lines: list[str], holds: bool, text: str) -> None:
    found = prove(library="Open MPI v5", mapped=[launcher(tmp_path, *lines)])
    assert found.holds is holds
    assert text in found.text


def test_a_launch_that_does_not_end_is_ended(tmp_path: Path) -> None:
    note = tmp_path / "note"
    begun = time.monotonic()
    mapped = [launcher(tmp_path, f"echo $$ > {note}", "sleep 60 & wait")]
    found = prove(library="", mapped=mapped, timeout_s=0.5)
    assert found == Proof(False, "tried in a launch of its own, which did not end within 0.5 s")
    assert time.monotonic() - begun < 20
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


def test_what_is_launched(tmp_path: Path) -> None:
    """Two ranks of this Python; Open MPI is told that there may be fewer cores."""
    note = tmp_path / "note"
    mapped = [launcher(tmp_path, f"printf '%s\\n' \"$*\" > {note}", f"env >> {note}")]
    environ = {"PATH": os.environ["PATH"], "PMI_RANK": "0", "PYTHONPATH": "/else", "UCX_TLS": "all"}
    for library, options in (("Open MPI v5", "--oversubscribe --bind-to none "), ("MPICH Version: 5", "")):
        prove("cpu", library=library, mapped=mapped, environ=environ)
        words, *variables = note.read_text().splitlines()
        assert words == f"{options}-n 2 {sys.executable} -P -m mpipipe.transport.probe cpu"
        assert "UCX_TLS=all" in variables
        assert not [one for one in variables if one.startswith("PMI")]
        (path,) = (one for one in variables if one.startswith("PYTHONPATH="))
        assert path.endswith(":/else")
        assert (Path(path.split("=")[1].split(":")[0]) / "mpipipe" / "transport" / "probe.py").exists()


def test_without_a_launcher_the_way_out_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    found = prove(library="CRAY MPICH", mapped=[], environ={"PATH": str(tmp_path)})
    assert not found.holds
    assert 'run "mpirun -n 2 mpipipe doctor"' in found.text
    assert 'comm.path = "cuda-aware"' in found.text


def test_a_launcher_that_can_not_be_run_is_told(tmp_path: Path) -> None:
    mapped = [launcher(tmp_path)]
    (tmp_path / "bin" / "mpirun").write_text("#!/no/such/shell\n")
    found = prove(library="", mapped=mapped)
    assert not found.holds
    assert "does not start (No such file or directory)" in found.text


def test_the_launcher_is_that_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python" / "bin" / "python"))
    mapped = ["/lib/libc.so.6", launcher(tmp_path / "mpi")]
    launcher(tmp_path / "python")
    launcher(tmp_path / "path")
    environ = {"PATH": str(tmp_path / "path" / "bin")}
    assert find_launcher(mapped, environ) == str(tmp_path / "mpi" / "bin" / "mpirun")
    deeper = [str(tmp_path / "mpi" / "lib" / "x86_64" / "libmpi.so")]
    assert find_launcher(deeper, environ) == str(tmp_path / "mpi" / "bin" / "mpirun")
    assert find_launcher([], environ) == str(tmp_path / "python" / "bin" / "mpirun")
    (tmp_path / "python" / "bin" / "mpirun").unlink()
    assert find_launcher([], environ) == str(tmp_path / "path" / "bin" / "mpirun")
    (tmp_path / "path" / "bin" / "mpirun").rename(tmp_path / "path" / "bin" / "mpiexec")
    assert find_launcher([], environ) == str(tmp_path / "path" / "bin" / "mpiexec")


OF_A_LAUNCH = [
    *("PMI_RANK", "PMI_FD", "HYDI_CONTROL_FD", "HYDRA_BOOTSTRAP", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMIX_RANK"),
    *("PMIX_SERVER_URI41", "PRTE_LAUNCHED", "OMPI_COMM_WORLD_RANK", "OMPI_COMMAND", "OMPI_MCA_num_procs"),
    *("OMPI_MCA_initial_wdir", "SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_LOCALID", "PALS_RANKID", "PBS_NODEFILE"),
]
OF_THE_USER = ["OMPI_MCA_pml", "OMPI_ALLOW_RUN_AS_ROOT", "UCX_TLS", "MPIR_CVAR_NOLOCAL", "LD_LIBRARY_PATH", "HOME"]


def test_the_probe_is_no_part_of_this_launch() -> None:
    kept = probe_environment(dict.fromkeys(OF_A_LAUNCH + OF_THE_USER, "1"))
    assert set(OF_THE_USER) <= set(kept)
    assert not set(OF_A_LAUNCH) & set(kept)
    assert kept["OMP_NUM_THREADS"] == "1"
