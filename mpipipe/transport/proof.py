"""Whether memory of a GPU arrives right: a checked pattern, in a launch of its own or in the job itself.

An MPI library that takes no device pointers does not say so: it crashes, or sends what lies elsewhere. So what a query
hints at is tried in two processes of their own (``prove``), whose crash is an answer. Where no launcher can be started
from a rank, as under srun alone, the user asks for it by ``comm.path = "cuda-aware"``, and the pattern is exchanged in
the job (``exchange_pattern``).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from mpipipe.errors import NotCudaAwareError, TransportError
from mpipipe.transport.awareness import Finding, mapped_libraries, mpi_libraries, verdict
from mpipipe.transport.protocol import Transport

if TYPE_CHECKING:
    from mpipipe.device import Device

PROOF_SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 8 << 20)
"""Bytes of the messages: libraries take another way for short, middling and long ones."""

PROOF_WITHIN_S = 60.0
_ENDS_WITHIN_S = 5.0
_TAG = 0  # of the messages of a schedule, of which none is under way yet

ANSWER = "mpipipe-probe "
"""What the line begins with in which the probe answers; JSON follows."""

_OF_A_LAUNCH = (
    *("PMI_", "PMI2_", "PMIX_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL", "I_MPI_PMI_LIBRARY"),
    *("OMPI_COMM_WORLD_", "OMPI_WORLD_", "OMPI_UNIVERSE_SIZE", "OMPI_APP_CTX", "OMPI_NUM_APP_CTX", "OMPI_FIRST_RANKS"),
    *("OMPI_ARGV", "OMPI_COMMAND", "OMPI_FILE_LOCATION", "OMPI_TOOL_NAME", "OMPI_MCA_num_procs", "OMPI_MCA_ess"),
    *("OMPI_MCA_initial_wdir", "OMPI_MCA_orte_", "OPAL_USER_PARAMS_GIVEN", "MV2_COMM_WORLD_", "MPISPAWN_"),
    *("SLURM_", "PALS_", "PBS_", "LSB_", "LS_", "PE_HOSTFILE", "ALPS_", "COBALT_"),
)
"""What launchers and batch systems tell their processes: variables that begin so are kept from the probe, whose
launcher would take itself for one of this job's processes, or ask the batch system for nodes.
"""


@dataclass(frozen=True, slots=True)
class Proof:
    """``holds``: the pattern arrived right; ``text``: what was seen, without a full stop."""

    holds: bool
    text: str


@dataclass(frozen=True, slots=True)
class MessagePath:
    """How messages leave a GPU: out of its own memory, or by way of host memory; and why."""

    name: Literal["cuda-aware", "staged"]
    reason: str


def choose_path(asked: str, findings: Sequence[Finding], prove: Callable[[], Proof]) -> MessagePath:
    """The path for ``comm.path = asked`` (``auto``, ``staged``, ``cuda-aware``). ``prove`` is called for ``auto`` where
    a finding says yes. One rank decides for all.
    """
    if asked == "staged":
        return MessagePath("staged", 'comm.path = "staged"')
    if asked == "cuda-aware":
        return MessagePath("cuda-aware", 'comm.path = "cuda-aware"')
    said = verdict(findings)
    if said.says != "yes":
        return MessagePath("staged", said.text)
    proof = prove()
    return MessagePath("cuda-aware" if proof.holds else "staged", f"{said.text}; {proof.text}")


# --- in this job ---


def pattern(nbytes: int, rank: int, turn: int) -> npt.NDArray[np.uint8]:
    """Bytes of ``rank``'s message number ``turn``; no two of them are alike."""
    return ((np.arange(nbytes, dtype=np.uint32) * 131 + 17 * rank + 59 * turn + nbytes) % 251).astype(np.uint8)


def exchange_pattern(transport: Transport, device: Device, sizes: Sequence[int] = PROOF_SIZES) -> None:
    """Let every rank send the pattern to both neighbours in a ring of all ranks. Collective.

    Raises ``NotCudaAwareError`` on a rank where something arrived wrong, after all messages are through, or where MPI
    refuses or a wait ran out; to be made one error of all ranks by ``collectives.agree``.
    """
    try:
        wrong = wrong_arrivals(transport, device, sizes)
    except TransportError as error:
        raise _not_aware(transport, f"did not arrive ({error})") from error
    if wrong:
        raise _not_aware(transport, f"arrived wrong ({'; '.join(wrong[:3])})")


def _not_aware(transport: Transport, how: str) -> NotCudaAwareError:
    return NotCudaAwareError(
        f"a test message out of GPU memory {how}: {transport.library} does not take memory of a GPU here. "
        'Set comm.path = "staged"; docs/gpu.md tells which MPI libraries do'
    )


def wrong_arrivals(transport: Transport, device: Device, sizes: Sequence[int] = PROOF_SIZES) -> list[str]:
    """Exchange the pattern in the ring; what arrived wrong on this rank, in words. Collective."""
    rank, size = transport.rank, transport.size
    wrong: list[str] = []
    for turn, (nbytes, step) in enumerate((nbytes, step) for step in (1, -1) for nbytes in sizes):
        source, target = (rank - step) % size, (rank + step) % size
        arrived = pass_on(transport, device, pattern(nbytes, rank, turn), source, target)
        bad = int(np.count_nonzero(arrived != pattern(nbytes, source, turn)))
        if bad:
            wrong.append(f"{bad} of {nbytes} bytes from rank {source}")
    return wrong


def pass_on(
    transport: Transport, device: Device, values: npt.NDArray[np.uint8], source: int, target: int
) -> npt.NDArray[np.uint8]:
    """Send ``values`` out of the device's memory to rank ``target``; what came of rank ``source``, of as many bytes."""
    import torch

    buffer = device.allocate(values.nbytes)
    device.tensor(buffer, values.shape, torch.uint8).fill_(255)
    device.release(buffer)
    out = device.outgoing(torch.from_numpy(values).to(device.torch_device))
    device.finish()
    device.receiving(buffer)
    what = f"a test message of {values.nbytes} bytes"
    receive = transport.irecv(buffer.message, source, _TAG)
    send = transport.isend(out.message, target, _TAG)
    transport.wait(receive, f"{what} of rank {source}")
    transport.wait(send, f"rank {target} to take {what}")
    device.sent(out)
    device.landed(buffer)
    tensor = device.tensor(buffer, values.shape, torch.uint8)
    arrived: npt.NDArray[np.uint8] = device.copy_to_host(tensor).numpy().copy()
    del tensor
    device.forget(buffer)
    return arrived


# --- in a launch of its own ---


def prove(
    device: str = "cuda",
    *,
    library: str,
    mapped: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = PROOF_WITHIN_S,
) -> Proof:
    """Start two processes by the launcher of the MPI library that is loaded, let them exchange the pattern out of
    ``device``'s memory (as ``mpipipe.transport.probe`` takes it), and tell how it ended. Takes some seconds.
    """
    given = os.environ if environ is None else environ
    launcher = find_launcher(mapped_libraries() if mapped is None else mapped, given)
    if launcher is None:
        return Proof(False, f"not proved, since no mpirun or mpiexec was found to try it with: {BY_HAND}")
    options = ["--oversubscribe", "--bind-to", "none"] if "open mpi" in library.lower() else []
    command = [launcher, *options, "-n", "2", sys.executable, "-P", "-m", "mpipipe.transport.probe", device]
    try:
        code, output = _run(command, probe_environment(given), timeout_s)
    except OSError as error:
        return Proof(False, f"not proved, since {launcher} does not start ({error.strerror or error}): {BY_HAND}")
    return _judge(code, output, timeout_s)


BY_HAND = (
    'run "mpirun -n 2 mpipipe doctor" with the launcher of your jobs, and where that proves it, set '
    'comm.path = "cuda-aware"'
)


def find_launcher(mapped: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """The mpirun or mpiexec of the MPI library that is loaded: that of its own folder, else the one beside this Python,
    else the first on the PATH.
    """
    homes = [folder.parent for path in mpi_libraries(mapped) for folder in list(Path(path).parents)[:2]]
    folders = [*(str(home / "bin") for home in homes), str(Path(sys.executable).parent)]
    for path in (os.pathsep.join(folders), environ.get("PATH", os.defpath)):
        for name in ("mpirun", "mpiexec"):
            found = shutil.which(name, path=path)
            if found:
                return found
    return None


def probe_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the probe: this one's, without what belongs to this launch or to a batch system's step."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_OF_A_LAUNCH)}
    package = str(Path(__file__).resolve().parents[2])
    kept["PYTHONPATH"] = os.pathsep.join(part for part in (package, environ.get("PYTHONPATH")) if part)
    kept["OMP_NUM_THREADS"] = "1"
    return kept


def _run(command: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> tuple[int | None, str]:
    """Exit code, None where it did not end in time; and all that it said."""
    with subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
            return process.returncode, output
        except BaseException as error:
            output = _end(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return None, output


def _end(process: subprocess.Popen[str]) -> str:
    """By a signal that the launcher passes on to its processes; then by one that no one can refuse."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(OSError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=_ENDS_WITHIN_S)[0]
    return ""


def _judge(code: int | None, output: str, timeout_s: float) -> Proof:
    answers = list(_answers(output))
    for answer in answers:
        if answer.get("error"):
            return Proof(False, f"tried in a launch of its own, and not proved: {answer['error']}")
    if code is None:
        return Proof(False, f"tried in a launch of its own, which did not end within {timeout_s:g} s")
    if code == 0 and answers and answers[0].get("right"):
        return Proof(True, "proved by messages in a launch of its own")
    return Proof(False, f"tried in a launch of its own, which crashed (exit code {code}{_telling_line(output)})")


def _telling_line(output: str) -> str:
    """What a launch that crashed said: the line with the signal, else with an error, else its last words."""
    lines = [line.strip(" =|*-") for line in output.splitlines() if re.search("[A-Za-z]", line)]
    for words in (r"signal|segmentation|bus error", r"error|cannot|not found|fail"):
        found = [line for line in lines if re.search(words, line, re.IGNORECASE)]
        if found:
            return f": {found[0][:200]}"
    return f": {lines[-1][:200]}" if lines else ""


def _answers(output: str) -> Iterator[dict[str, Any]]:
    for line in output.splitlines():
        _, found, text = line.partition(ANSWER)
        if found:
            with suppress(ValueError):
                yield json.loads(text)
