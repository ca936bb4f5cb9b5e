"""What the doctor says of GPUs, with made-up ones: facts as ranks gather them, the late driver behind loopback."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.late import LateDriver

from mpipipe.cli import doctor_gpu
from mpipipe.cli.doctor_gpu import awareness, binding, device_models, devices, gpu_verdicts, rates, rates_text
from mpipipe.cli.verdict import Verdict
from mpipipe.device import Buffer, Device, HostDevice
from mpipipe.device.streams import StreamDevice
from mpipipe.errors import DeviceBindingError
from mpipipe.transport import Transport, run_ranks
from mpipipe.transport.awareness import Finding
from mpipipe.transport.loopback import LoopbackTransport
from mpipipe.transport.proof import Proof


def shown(verdicts: Iterator[Verdict]) -> list[str]:
    return [f"{verdict.level} {verdict.subject}: {verdict.text}" for verdict in verdicts]


# --- devices of a machine ---


def fake_torch(monkeypatch: pytest.MonkeyPatch, version: str | None, count: int) -> None:
    cuda = SimpleNamespace(device_count=lambda: count)  # all that may be asked before MPI begins
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda=version)))


def test_a_machine_without_a_gpu_has_one_short_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # is not imported for it
    text = 'no NVIDIA device, CuPy not installed: comm.device = "auto" computes on the CPU'
    assert devices(None, []) == Verdict("devices", "ok", text)


def test_a_machine_with_gpus_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch, "13.0", 2)
    nodes, models = ["nvidia0", "nvidia1"], {"nvidia0": "NVIDIA H200"}
    found = devices("14.2.0", nodes, models=models, environ={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert found.level == "ok"
    assert found.text == (
        "2 NVIDIA devices (nvidia0: NVIDIA H200, nvidia1), CUDA_VISIBLE_DEVICES=0,1; torch sees 2 GPUs; CuPy 14.2.0"
    )


INFORMATION = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 200\nGPU UUID: \t GPU-1\nDevice Minor: \t 3\n"


def test_the_driver_tells_the_models(tmp_path: Path) -> None:
    (tmp_path / "0000:1a:00.0").mkdir()
    (tmp_path / "0000:1a:00.0" / "information").write_text(INFORMATION)
    (tmp_path / "0000:1b:00.0" / "information").mkdir(parents=True)
    assert device_models(tmp_path) == {"nvidia3": "NVIDIA H200"}
    assert device_models(tmp_path / "none") == {}


@pytest.mark.parametrize(
    "cupy, version, lacks",
    [
        (None, "12.8", ["CuPy is not installed: pip install 'mpipipe[cuda12]', or cuda13"]),
        ("14.2", None, ["this torch was built without CUDA"]),
        (None, None, ["CuPy is not installed", "this torch was built without CUDA"]),
    ],
)
def test_what_a_gpu_lacks_is_named(
    cupy: str | None, version: str | None, lacks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_torch(monkeypatch, version, 0)
    found = devices(cupy, ["nvidia0"], models={}, environ={})
    assert found.level == "missing"
    assert "torch sees 0 GPUs" in found.text
    for lack in lacks:
        assert lack in found.text.split('For comm.device = "cuda": ')[1]


def test_a_gpu_without_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "torch is not installed" in devices("14.2", ["nvidia0"], models={}, environ={}).text


# --- which rank takes which ---


def place(index: int, uuid: str, node: str = "n1", local_rank: int | None = None, slurm: str | None = None) -> Any:
    local = index if local_rank is None else local_rank
    fields = {"node": node, "local_rank": local, "slurm_local_id": slurm, "count": 2, "usable": True}
    return fields | {"index": index, "name": "NVIDIA H200", "uuid": uuid}


def without(node: str = "n1") -> Any:
    return {"node": node, "local_rank": 0, "slurm_local_id": None, "count": 0, "usable": False}


def test_each_rank_has_a_gpu_of_its_own() -> None:
    assert shown(binding([place(0, "GPU-a", slurm="0"), place(1, "GPU-b", slurm="1")])) == [
        "ok GPU of each rank: rank 0 GPU 0 of n1 (NVIDIA H200, GPU-a); rank 1 GPU 1 of n1 (NVIDIA H200, GPU-b)"
    ]


def test_two_ranks_on_one_gpu_are_told() -> None:
    _, shared = binding([place(0, "GPU-a"), place(0, "GPU-a", local_rank=1)])
    assert shared.level == "warning"
    assert "ranks 0 and 1 share one GPU of node n1 (GPU-a)" in shared.text


def test_ranks_without_a_gpu_are_told() -> None:
    _, lacking = binding([place(0, "GPU-a"), without("n2"), without("n2")])
    assert lacking == Verdict("GPU of each rank", "warning", "ranks without a GPU: 1, 2")


def test_a_gpu_that_does_not_answer_is_told() -> None:
    _, silent = binding([place(0, "GPU-a"), place(1, "") | {"name": "no answer", "usable": False}])
    assert silent.level == "warning"
    assert silent.text.startswith("CUDA does not begin on the GPUs of ranks 1:")


@pytest.mark.parametrize("broken", [False, True])
def test_what_a_rank_tells_of_its_gpu(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(index: int) -> SimpleNamespace:
        if broken:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")
        return SimpleNamespace(name=f"GPU number {index}", uuid=f"GPU-{index}")

    monkeypatch.setattr(doctor_gpu, "device_nodes", lambda: ["nvidia0", "nvidia1"])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", properties)
    monkeypatch.setattr("mpipipe.environment.software_versions", lambda: {"cupy": "14.2"})
    monkeypatch.setenv("SLURM_LOCALID", "0")
    found = run_ranks(3, doctor_gpu._mine)
    assert [one["index"] for one in found] == [0, 1, 0]
    assert [one["slurm_local_id"] for one in found] == ["0"] * 3
    assert [one["uuid"] for one in found] == ([""] * 3 if broken else ["GPU-0", "GPU-1", "GPU-0"])
    assert [one["usable"] for one in found] == [not broken] * 3


def test_a_slurm_variable_of_the_daemon_is_told() -> None:
    """Three ranks under a mpirun in a batch job all saw 0."""
    ranks = [place(0, "GPU-a", slurm="0"), place(1, "GPU-b", slurm="0")]
    (line,) = shown(binding(ranks))[1:]
    assert line.startswith("ok SLURM_LOCALID: 0 on rank 1, which is number 1 of its node: it is that of the launcher")


# --- what the library says ---


def test_findings_that_warn_have_a_line_each() -> None:
    findings = [
        Finding("MPIX_Query_cuda_support", "no", "libmpi.so.40 was built without CUDA"),
        Finding("UCX_TLS", "no", "UCX_TLS=tcp leaves out cuda", warns=True),
    ]
    assert shown(awareness(findings)) == [
        "ok CUDA-aware MPI: the MPI library takes no GPU memory, say MPIX_Query_cuda_support, UCX_TLS. "
        "MPIX_Query_cuda_support: no (libmpi.so.40 was built without CUDA)",
        "warning CUDA-aware MPI: UCX_TLS=tcp leaves out cuda",
    ]
    assert "does not say" in shown(awareness([]))[0]


# --- messages, over loopback ---


class Wrong(HostDevice):
    def outgoing(self, tensor: torch.Tensor) -> Buffer:
        return super().outgoing(tensor + 1)


Open = Callable[..., Device]


def open_late(name: str, *, local_rank: int, local_size: int, staged: bool) -> Device:
    return HostDevice() if name == "cpu" else StreamDevice(LateDriver(local_rank), staged)


def examine(
    monkeypatch: pytest.MonkeyPatch,
    *,
    size: int = 2,
    as_json: bool = False,
    findings: tuple[Finding, ...] = (),
    open_device: Open = open_late,
    usable: bool = True,
    log: list[str] | None = None,
) -> list[str]:
    """The verdicts that rank 0 gets, on ranks that each have a late GPU."""

    def opened(name: str, **keys: Any) -> Device:
        if log is not None:
            log.append(f"open {name}")
        return open_device(name, **keys)

    def mine(transport: Transport) -> Any:
        return place(transport.rank, f"GPU-{transport.rank}") | {"usable": usable}

    monkeypatch.setattr(doctor_gpu, "_mine", mine)
    monkeypatch.setattr(doctor_gpu, "MEASURED_BYTES", (100, 3000))
    monkeypatch.setattr("mpipipe.device.open_device", opened)
    monkeypatch.setattr(LoopbackTransport, "cuda_findings", lambda self: list(findings))

    def work(transport: Transport) -> list[str]:
        found = []
        for verdict in gpu_verdicts(transport, as_json):
            if log is not None and transport.rank == 0:
                log.append(verdict.text)
            found.append(f"{verdict.level} {verdict.subject}: {verdict.text}")
        return found

    return run_ranks(size, work)[0]


RATES = r"ok GPU messages: GB/s from rank 0 to rank 1 \(100 B, 2\.93 KiB\): "


def test_without_a_gpu_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_gpu, "device_nodes", list)
    (line,) = run_ranks(2, lambda transport: shown(gpu_verdicts(transport, False)))[0]
    assert line == "ok GPU messages: no GPU here; the MPI library does not say whether it takes memory of a GPU"


@pytest.mark.parametrize("size", [2, 3])
def test_gpu_memory_is_proved_by_messages_and_every_path_is_measured(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, trying, proved, speed = examine(monkeypatch, size=size)
    assert trying.startswith("ok GPU messages: sending out of GPU memory; if the launch ends here")
    assert proved.startswith("ok GPU messages: proved by messages")
    assert re.match(RATES + r"host memory [\d., ]+; staged [\d., ]+; cuda-aware [\d., ]+$", speed), speed


def test_what_is_tried_is_told_before_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    examine(monkeypatch, size=3, log=log)
    first = next(k for k, line in enumerate(log) if line.startswith("open"))
    assert log[first - 1].startswith("sending out of GPU memory")


def test_wrong_bytes_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on by way of host memory; only what was asked for and can't be is an error, and nothing was."""

    def open_wrong(name: str, *, staged: bool, **keys: int) -> Device:
        return HostDevice() if staged else Wrong()

    *_, wrong, speed = examine(monkeypatch, open_device=open_wrong)
    assert wrong.startswith("warning GPU messages: wrong bytes arrived: this MPI library takes no GPU memory (8 of 8")
    assert "cuda-aware" not in speed


def test_a_library_that_says_no_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, untried, speed = examine(monkeypatch, findings=(Finding("a query", "no", "it was built without"),))
    assert "not tried out of GPU memory, since the library says no (MPIPIPE_CUDA_AWARE=1 mpirun" in untried
    assert "cuda-aware" not in speed


@pytest.mark.parametrize("holds", [True, False])
def test_json_is_not_lost_in_a_crash(holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def prove(*, library: str) -> Proof:
        asked.append(library)
        return Proof(holds, "tried in a launch of its own")

    monkeypatch.setattr("mpipipe.transport.proof.prove", prove)
    found = examine(monkeypatch, as_json=True)
    assert asked == ["loopback (one process)"]
    assert any("proved by messages" in line for line in found) is holds
    assert ("warning GPU messages: tried in a launch of its own" in found) is not holds


def test_one_rank_is_sent_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "mpirun -n 2" in examine(monkeypatch, size=1)[-1]


def test_ranks_that_lack_something_try_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [line for line in examine(monkeypatch, usable=False) if "GPU messages" in line]


def test_a_device_that_does_not_open_is_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *, local_rank: int, **keys: Any) -> Device:
        if local_rank == 1:
            raise DeviceBindingError("rank 1 sees no GPU")
        return open_late(name, local_rank=local_rank, **keys)

    assert examine(monkeypatch, open_device=refuse)[-1] == "wrong GPU messages: rank 1 sees no GPU"


def test_rates_are_bytes_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_gpu, "_round_s", lambda transport, device, nbytes: nbytes * 1e-9)
    assert run_ranks(2, lambda transport: rates(transport, HostDevice(), (1000, 5000)))[0] == pytest.approx([8e9, 8e9])
    text = rates_text({"staged": [1.5e9, 2e9]}, (1024, 4096))
    assert text == "GB/s from rank 0 to rank 1 (1.00 KiB, 4.00 KiB): staged 1.50, 2.00"
