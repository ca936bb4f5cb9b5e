"""What ``mpipipe doctor`` says of GPUs: which there are, which rank takes which, whether MPI takes their memory, and
how fast messages are on each path. Imports torch only where there is an NVIDIA device, CuPy only to try it.
"""

from __future__ import annotations

import importlib
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpipipe import environment
from mpipipe.cli.verdict import Level, Verdict
from mpipipe.errors import MpipipeError, TransportError
from mpipipe.units import counted, format_bytes

if TYPE_CHECKING:
    from mpipipe.device import Device, Mark
    from mpipipe.transport import Transport
    from mpipipe.transport.awareness import Finding

MEASURED_BYTES = (64 << 10, 1 << 20, 16 << 20)
_MESSAGES = 8
_ROUNDS = 5
_TAG = 0


def device_nodes(folder: Path = Path("/dev")) -> list[str]:
    """Names of the NVIDIA devices of this machine, as ``nvidia0``."""
    return sorted(path.name for path in folder.glob("nvidia[0-9]*"))


def device_models(folder: Path = Path("/proc/driver/nvidia/gpus")) -> dict[str, str]:
    """Models by device name, where the driver tells: asking CUDA would begin its work before MPI's."""
    found = {}
    for path in sorted(folder.glob("*/information")):
        with suppress(OSError):
            parts = (line.partition(":") for line in path.read_text(errors="replace").splitlines())
            fields = {key.strip(): value.strip() for key, _, value in parts}
            if "Model" in fields:
                found[f"nvidia{fields.get('Device Minor', '')}"] = fields["Model"]
    return found


def devices(
    cupy: str | None,
    nodes: Sequence[str],
    *,
    models: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Verdict:
    """What one process can tell of the GPUs of this machine. ``cupy``: its version, None if it is not installed."""
    given = os.environ if environ is None else environ
    about_cupy = f"CuPy {cupy}" if cupy else "CuPy not installed"
    if not nodes:
        return Verdict("devices", "ok", f'no NVIDIA device, {about_cupy}: comm.device = "auto" computes on the CPU')
    known = device_models() if models is None else models
    named = ", ".join(f"{node}: {known[node]}" if node in known else node for node in nodes)
    text = f"{counted(len(nodes), 'NVIDIA device')} ({named})"
    visible = given.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        text += f", CUDA_VISIBLE_DEVICES={visible}"
    lacking = [] if cupy else ["CuPy is not installed: pip install 'mpipipe[cuda12]', or cuda13"]
    try:
        torch = importlib.import_module("torch")
        text += f"; torch sees {counted(torch.cuda.device_count(), 'GPU')}; {about_cupy}"
        if torch.version.cuda is None:
            lacking.append("this torch was built without CUDA")
    except ImportError:
        lacking.append("torch is not installed")
    if lacking:
        return Verdict("devices", "missing", f'{text}. For comm.device = "cuda": {"; ".join(lacking)}')
    return Verdict("devices", "ok", text)


def gpu_verdicts(transport: Transport, as_json: bool) -> Iterator[Verdict]:
    """What all ranks know of GPUs together. Collective. The last ones try messages out of GPU memory: with ``as_json``
    in a launch of its own first, so that a crash does not take the report with it.
    """
    from mpipipe.collectives import all_gather_objects
    from mpipipe.transport.awareness import Finding

    ranks = all_gather_objects(transport, _mine(transport))
    findings = [Finding(**fields) for fields in all_gather_objects(transport, _findings(transport))[0]]
    if not any(rank["count"] for rank in ranks):
        yield Verdict("GPU messages", "ok", f"no GPU here; {said(findings)}")
        return
    yield from binding(ranks)
    yield from awareness(findings)
    if transport.size < 2:
        yield Verdict("GPU messages", "ok", "to try them, start the doctor on 2 ranks or more: mpirun -n 2")
    elif all(rank["usable"] for rank in ranks):
        try:
            yield from _tried(transport, findings, as_json)
        except MpipipeError as error:
            if not error.seen_alike:
                raise
            level: Level = "warning" if isinstance(error, TransportError) else "wrong"
            yield Verdict("GPU messages", level, str(error).replace("\n", " "))


def _findings(transport: Transport) -> list[dict[str, Any]]:
    return [asdict(finding) for finding in transport.cuda_findings()]


def _mine(transport: Transport) -> dict[str, Any]:
    """This rank's GPU. ``usable``: there is all that one needs."""
    found: dict[str, Any] = {
        "node": environment.node_name(),
        "local_rank": transport.local_rank,
        "slurm_local_id": os.environ.get("SLURM_LOCALID"),
        "count": 0,
        "usable": False,
    }
    if not device_nodes():
        return found
    try:
        cuda = importlib.import_module("torch").cuda
    except ImportError:
        return found
    count = found["count"] = cuda.device_count()
    if count:
        from mpipipe.device.binding import choose_device

        index = choose_device(count, transport.local_rank, transport.local_size)
        found |= {"index": index, "name": "no answer", "uuid": ""}
        with suppress(RuntimeError):  # CUDA does not begin: the GPU is another process's, or broken
            properties = cuda.get_device_properties(index)
            found |= {"name": properties.name, "uuid": str(getattr(properties, "uuid", ""))}
            found["usable"] = environment.software_versions()["cupy"] is not None
    return found


def binding(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Verdict]:
    """Which rank takes which GPU. Of each rank: ``node``, ``local_rank``, ``slurm_local_id``, ``count`` of the GPUs it
    sees, and of the one that it takes ``index``, ``name`` and ``uuid``.
    """
    from mpipipe.device.binding import shared_devices

    places = [
        f"rank {number} GPU {rank['index']} of {rank['node']} ({rank['name']}{', ' * bool(rank['uuid'])}{rank['uuid']})"
        for number, rank in enumerate(ranks)
        if rank["count"]
    ]
    yield Verdict("GPU of each rank", "ok", "; ".join(places))
    silent = [str(number) for number, rank in enumerate(ranks) if rank.get("name") == "no answer"]
    if silent:
        text = f"CUDA does not begin on the GPUs of ranks {', '.join(silent)}: does nvidia-smi work there, and is the "
        yield Verdict("GPU of each rank", "warning", f"{text}GPU free?")
    without = [str(number) for number, rank in enumerate(ranks) if not rank["count"]]
    if without:
        yield Verdict("GPU of each rank", "warning", f"ranks without a GPU: {', '.join(without)}")
    shared = shared_devices([(rank["node"], rank.get("uuid", "")) for rank in ranks])
    if shared:
        yield Verdict("GPU of each rank", "warning", shared)
    other = [
        f"{rank['slurm_local_id']} on rank {number}, which is number {rank['local_rank']} of its node"
        for number, rank in enumerate(ranks)
        if rank["slurm_local_id"] not in (None, str(rank["local_rank"]))
    ]
    if other:
        text = f"{'; '.join(other)}: it is that of the launcher's daemon, and mpipipe does not use it"
        yield Verdict("SLURM_LOCALID", "ok", text)


def said(findings: Sequence[Finding]) -> str:
    """What the MPI library says of memory of a GPU, in one line."""
    from mpipipe.transport.awareness import verdict

    found = verdict(findings)
    words = {"yes": "the MPI library may take GPU memory", "no": "the MPI library takes no GPU memory"}
    return f"{words[found.says]}, say {found.source}" if found.says in words else found.text


def awareness(findings: Sequence[Finding]) -> Iterator[Verdict]:
    """All findings: those that warn in a line each."""
    heard = "; ".join(f"{found.source}: {found.says} ({found.text})" for found in findings if not found.warns)
    yield Verdict("CUDA-aware MPI", "ok", f"{said(findings)}{'. ' * bool(heard)}{heard}")
    for found in findings:
        if found.warns:
            yield Verdict("CUDA-aware MPI", "warning", found.text)


# --- messages ---


def _tried(transport: Transport, findings: Sequence[Finding], as_json: bool) -> Iterator[Verdict]:
    """The pattern out of GPU memory, then how fast each path is."""
    from mpipipe.collectives import agree, all_gather_objects, barrier, on_first_rank
    from mpipipe.device import open_device
    from mpipipe.transport.awareness import OVERRIDE, verdict
    from mpipipe.transport.proof import PROOF_WITHIN_S, prove, wrong_arrivals

    def opened(name: str, staged: bool) -> Device:
        local_rank, local_size = transport.local_rank, transport.local_size
        return agree(
            transport, lambda: open_device(name, local_rank=local_rank, local_size=local_size, staged=staged)
        )

    transport.configure(timeout_s=PROOF_WITHIN_S, wait="auto")
    proved = False
    if verdict(findings).says == "no":
        text = f"not tried out of GPU memory, since the library says no ({OVERRIDE}=1 mpirun ... tries it nevertheless)"
        yield Verdict("GPU messages", "ok", text)
    else:
        apart = on_first_rank(transport, lambda: asdict(prove(library=transport.library))) if as_json else None
        if apart is None or apart["holds"]:
            text = (
                "sending out of GPU memory; if the launch ends here, this MPI library does not take it: "
                'comm.path = "staged"'
            )
            yield Verdict("GPU messages", "ok", text)
            barrier(transport)  # the line is printed
            aware = opened("cuda", staged=False)
            wrong = all_gather_objects(transport, agree(transport, lambda: wrong_arrivals(transport, aware)))
            proved = not any(wrong)
            text = f"wrong bytes arrived: this MPI library takes no GPU memory ({next(filter(None, wrong), [''])[0]})"
            if proved:
                text = 'proved by messages: this MPI library takes GPU memory (comm.path = "cuda-aware")'
            yield Verdict("GPU messages", "ok" if proved else "warning", text)
        else:
            yield Verdict("GPU messages", "warning", str(apart["text"]))
    paths = {"host memory": opened("cpu", staged=True), "staged": opened("cuda", staged=True)}
    if proved:
        paths["cuda-aware"] = aware
    found = {name: rates(transport, device, MEASURED_BYTES) for name, device in paths.items()}
    yield Verdict("GPU messages", "ok", rates_text(found, MEASURED_BYTES))


def rates(transport: Transport, device: Device, sizes: Sequence[int]) -> list[float]:
    """Bytes a second from rank 0 to rank 1, for messages of ``sizes`` bytes, one after another; medians, on rank 0. On
    the other ranks the numbers mean nothing. Collective.
    """
    from mpipipe.collectives import barrier

    found = []
    for nbytes in sizes:
        taken = [_round_s(transport, device, nbytes) for _ in range(_ROUNDS)]
        found.append(_MESSAGES * nbytes / statistics.median(taken[1:]))
        barrier(transport)
    return found


def _round_s(transport: Transport, device: Device, nbytes: int) -> float:
    import numpy as np
    import torch

    if transport.rank > 1:
        return 1.0
    peer, what = 1 - transport.rank, f"a message of {nbytes} bytes of the doctor"
    word = np.zeros(1, dtype=np.uint8)
    if transport.rank == 0:
        tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device.torch_device)
        device.finish()
        transport.wait(transport.irecv(word, peer, _TAG), "the doctor's word of rank 1")
        begun = time.perf_counter()
        for _ in range(_MESSAGES):
            out = device.outgoing(tensor)
            _reach(out.ready)
            transport.wait(transport.isend(out.message, peer, _TAG), f"rank 1 to take {what}")
            device.sent(out)
        transport.wait(transport.irecv(word, peer, _TAG), "the doctor's word of rank 1")
        return time.perf_counter() - begun
    buffer = device.allocate(nbytes)
    transport.wait(transport.isend(word, peer, _TAG), "rank 0 to begin")
    for _ in range(_MESSAGES):
        _reach(buffer.free)
        device.receiving(buffer)
        transport.wait(transport.irecv(buffer.message, peer, _TAG), f"{what} of rank 0")
        device.landed(buffer)
        device.tensor(buffer, (nbytes,), torch.uint8)
        device.release(buffer)
    device.finish()
    transport.wait(transport.isend(word, peer, _TAG), "rank 0 to end")
    device.forget(buffer)
    return 1.0


def _reach(mark: Mark | None) -> None:
    while mark is not None and not mark.reached():
        pass


def rates_text(found: Mapping[str, Sequence[float]], sizes: Sequence[int]) -> str:
    """``GB/s from rank 0 to rank 1 (64.0 KiB, 1.00 MiB): staged 1.10, 5.02; ...``"""
    rows = [f"{name} {', '.join(f'{rate / 1e9:.2f}' for rate in rates)}" for name, rates in found.items()]
    return f"GB/s from rank 0 to rank 1 ({', '.join(map(format_bytes, sizes))}): {'; '.join(rows)}"
