"""tools/device_check.py on a pretended GPU: the ways through its checks that only a GPU takes, so that none ends by a
slip of its own. Tensors live in host memory, messages go through a device that is late; no figure means anything.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.late import LateDriver

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import device_check_answers
import device_check_bits
import device_check_copies
import device_check_engine
import device_check_runs
import device_check_there
from device_check_answers import Answers

from mpipipe.device import StreamDevice, select
from mpipipe.trainer import devices

pytestmark = pytest.mark.slow


class PretendedStream:
    def __init__(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, other: PretendedStream) -> None:
        pass


def _here(make: Any) -> Any:
    """A function of torch that takes ``device="cuda"`` and ``pin_memory``."""

    @functools.wraps(make)
    def made(*given: Any, **named: Any) -> Any:
        named.pop("pin_memory", None)
        if named.get("device") == "cuda":
            named["device"] = "cpu"
        return make(*("cpu" if one == "cuda" else one for one in given), **named)

    return made


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch what the checks call, CuPy where they ask for it, and a late device where mpipipe opens a GPU."""
    memory = iter(range(1 << 30, 1 << 40, 1 << 20))
    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "synchronize": lambda: None,
        "Stream": PretendedStream,
        "current_stream": PretendedStream,
        "stream": lambda stream: contextlib.nullcontext(),
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "memory_allocated": lambda: next(memory),
        "max_memory_allocated": lambda: next(memory),
        "get_device_properties": lambda index: types.SimpleNamespace(
            name="Pretended H1", total_memory=8 << 30, major=9, minor=0, multi_processor_count=2, uuid="GPU-1"
        ),
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for owner, name in ((torch, "zeros"), (torch.Tensor, "to"), (torch.nn.Module, "to")):
        monkeypatch.setattr(owner, name, _here(getattr(owner, name)))
    monkeypatch.setattr(torch, "autocast", lambda device, dtype, real=torch.autocast: real("cpu", dtype=dtype))
    runtime = types.SimpleNamespace(runtimeGetVersion=lambda: 13000, driverGetVersion=lambda: 13010)
    cupy = types.SimpleNamespace(
        __version__="14.2", cuda=types.SimpleNamespace(runtime=runtime), arange=lambda n: torch.arange(n),
        __spec__=types.SimpleNamespace(),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(select, "_missing", lambda: ([], []))
    monkeypatch.setattr(devices, "prove_here", lambda *_: None)  # 8 MiB take this device seconds
    seeds = iter(range(10_000))
    monkeypatch.setattr(select, "_open_gpu", lambda index, staged: StreamDevice(LateDriver(next(seeds)), staged))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that a CPU trains in no time."""
    model = {"layers": 8, "hidden": 16, "heads": 2, "vocab": 32, "sequence": 8}
    case = {"model": model, "microbatch": 1, "warm": 1, "steps": 1, "rounds": 2}
    monkeypatch.setattr(device_check_engine, "case_of", lambda device, small: case | {"m": 4})
    monkeypatch.setattr(device_check_runs, "case_of", lambda device, small, m=8: case | {"m": m})
    monkeypatch.setattr(device_check_bits, "sizes", lambda device, small: model)
    monkeypatch.setattr(device_check_bits, "SCHEDULES", (("1f1b", 1), ("zb-v", 2)))
    monkeypatch.setattr(device_check_bits, "STEPS", 2)
    monkeypatch.setattr(device_check_copies, "MESSAGE_BYTES", (1 << 20,))
    monkeypatch.setattr(device_check_copies, "TURN_BYTES", 2 << 20)
    monkeypatch.setattr(device_check_copies, "ROUNDS", 2)


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """As they were."""
    yield
    torch.use_deterministic_algorithms(False)
    for enable in ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_cudnn_sdp"):
        getattr(torch.backends.cuda, enable)(True)


def rows_of(check: Any, folder: Path, **settings: Any) -> dict[str, dict[str, Any]]:
    """What a check answers, by case."""
    path = folder / "answers.jsonl"
    given = {"device": "cuda", "small": True, "mpi": False, "launcher": None, "ucx": None, "ends": time.time() + 100}
    check(given | settings, Answers(path))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["case"]: row for row in rows if "settings" not in row}


def all_ok(rows: dict[str, dict[str, Any]], *cases: str) -> None:
    for case in cases:
        assert rows[case]["level"] == "ok", rows[case]


def test_what_is_there(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], timeout_s: float) -> device_check_answers.Ended:
        said = "Pretended H1, 580, Exclusive_Process" if command[0] == "nvidia-smi" else "mpipipe 0.1.0"
        return device_check_answers.Ended(0, said, 0.1)

    monkeypatch.setattr(device_check_there, "run", run)
    rows = rows_of(device_check_there.check_there, tmp_path)
    all_ok(rows, "packages", "command line", "driver", "GPU", "CuPy")
    assert rows["compute mode"]["level"] == "missed"
    assert "Pretended H1, 8.0 GiB, compute capability 9.0" in rows["GPU"]["text"]
    assert "sum on the GPU: 45" in rows["CuPy"]["text"]


def test_bits(gpu: None, tiny: None, tmp_path: Path) -> None:
    rows = rows_of(device_check_bits.check_bits, tmp_path)
    plain = [f"{p} threads, {path}" for p in (2, 4) for path in ("staged", "cuda-aware")]
    own = [f"2 threads, {path}, a stream each" for path in ("staged", "cuda-aware")]
    all_ok(rows, "one rank", *plain, *own)
    assert len(rows) == 7


def test_a_rank_that_does_not_repeat_itself(
    gpu: None, tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first kernels give other bits each time, the second ones are not to be had, the third ones do."""
    whole = device_check_bits.one_rank

    def one_rank(settings: dict[str, Any]) -> dict[str, Any]:
        number = device_check_bits.KERNELS.index(settings["kernels"])
        if number == 1:
            raise RuntimeError("some_kernel does not have a deterministic implementation")
        found = whole(settings)
        if number == 0:
            found["steps"][0][0] = time.perf_counter().hex()
        return found

    monkeypatch.setattr(device_check_bits, "one_rank", one_rank)
    path = tmp_path / "answers.jsonl"
    settings: dict[str, Any] = {"device": "cuda", "small": True}
    assert device_check_bits.make_reference(settings, Answers(path)) is not None
    levels = [json.loads(line)["level"] for line in path.read_text().splitlines()]
    assert levels == ["wrong", "missed", "ok"]
    assert settings["kernels"] == device_check_bits.KERNELS[2]


def test_the_engine_beside_a_plain_loop(gpu: None, tiny: None, tmp_path: Path) -> None:
    rows = rows_of(device_check_engine.check_engine, tmp_path)
    all_ok(rows, "losses")
    assert rows["engine over plain"]["level"] in ("ok", "missed")
    assert len(rows["engine over plain"]["figures"]["ratios"]) == 2


def test_copies(gpu: None, tiny: None, tmp_path: Path) -> None:
    rows = rows_of(device_check_copies.check_staged, tmp_path)
    all_ok(rows, "bytes", "GPU to host, 1 MiB", "host to GPU, 1 MiB")
    assert rows["rank to rank"]["level"] == "absent"


def test_idle_time_by_the_trace(gpu: None, tiny: None, tmp_path: Path) -> None:
    rows = rows_of(device_check_runs.check_idle, tmp_path)
    all_ok(rows, "1 rank")
    assert "times are the device's" in rows["2 threads"]["text"]


def test_memory(gpu: None, tiny: None, tmp_path: Path) -> None:
    rows = rows_of(device_check_runs.check_memory, tmp_path)
    all_ok(rows, "1f1b, 4 threads", "zb-v, 2 threads", "gpipe, 2 threads")
    assert "bytes to receive into after five steps" in rows["gpipe, 2 threads"]["text"]
    assert rows["peak memory"]["level"] in ("ok", "missed")
