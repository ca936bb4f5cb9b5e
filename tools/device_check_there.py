"""Checks of ``device_check.py``: what is there, the device's contract, messages out of GPU memory, the doctor."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from device_check_answers import ROOT, Answers, Settings, answer, error_text, last_words, launch, left_s, run

NEEDED = ("numpy", "h5py", "pydantic", "xxhash", "torch")
VERBS_NEED = ("typer", "rich", "matplotlib")

MPI_QUESTIONS = """
import json, os, sys
import mpi4py
mpi4py.rc.finalize = False
from mpi4py import MPI
from mpipipe.transport.proof import find_launcher
from mpipipe.transport.awareness import mapped_libraries
library = MPI.Get_library_version().split("\\n")[0].strip().rstrip("\\0")
found = {"mpi4py": mpi4py.__version__, "library": library, "launcher": find_launcher(mapped_libraries(), os.environ)}
print("answer " + json.dumps(found), flush=True)
MPI.Finalize()
"""
SIZE_QUESTION = (
    "from mpi4py import MPI; c = MPI.COMM_WORLD; x = c.allgather(c.rank); "
    "c.rank == 0 and print(f'answer {x}', flush=True)"
)


def _answer(output: str) -> str | None:
    """What follows ``answer`` in what a process said."""
    for line in output.splitlines():
        before, found, text = line.partition("answer ")
        if found and not before:
            return text
    return None


# --- what is there ---


def check_there(settings: Settings, answers: Answers) -> None:
    from mpipipe import environment

    versions = environment.software_versions()
    gone = [name for name in NEEDED if versions[name] is None]
    shown = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if gone:
        text = f"missing, and needed for everything: {', '.join(gone)} (--wheels FOLDER brings them); there: {shown}"
        answers.row("packages", "wrong", text, **versions)
    else:
        answers.row("packages", "ok", shown, **versions)
    no_verbs = [name for name in VERBS_NEED if versions[name] is None]
    if no_verbs:
        answers.row("command line", "absent", f"not installed: {', '.join(no_verbs)}")
    else:
        said = run([sys.executable, "-m", "mpipipe", "--version"], 30)
        trouble = said.trouble()
        text = trouble or f"python -m mpipipe: {said.output.strip()}"
        answers.row("command line", "wrong" if trouble else "ok", text)
    _tell_mpi(settings, answers)
    if settings["device"] == "cuda":
        _tell_driver(answers)
        _tell_torch(answers)
    else:
        cores = environment.available_cores()
        answers.row("device", "ok", f"the CPU, {cores} cores: nothing here was seen on a GPU", cores=cores)
        answers.setting(device_name="cpu dry run")


def _tell_mpi(settings: Settings, answers: Answers) -> None:
    """The library that mpi4py loads and its launcher; tried with two ranks. Sets ``launcher``."""
    if not settings["mpi"]:
        answers.row("MPI", "absent", "not asked for (--no-mpi)")
        return
    if importlib.util.find_spec("mpi4py") is None:
        others = [name for name in ("mpirun", "mpiexec", "srun") if shutil.which(name)]
        text = f"mpi4py is not installed; launchers on the PATH: {', '.join(others) or 'none'}"
        answers.row("MPI", "absent", text)
        return
    said = run([sys.executable, "-c", MPI_QUESTIONS], 20)
    told = _answer(said.output)
    if told is None:
        answers.row("MPI", "absent", f"mpi4py finds no MPI library that starts: {said.trouble() or said.output[-300:]}")
        return
    found = json.loads(told)
    where = f"{found['library']}, mpi4py {found['mpi4py']}"
    if found["launcher"] is None:
        answers.row("MPI", "absent", f"{where}; no mpirun or mpiexec", **found)
        return
    options = ["--oversubscribe", "--bind-to", "none"] if "open mpi" in found["library"].lower() else []
    launcher = [found["launcher"], *options]
    tried = run([*launcher, "-n", "2", sys.executable, "-c", SIZE_QUESTION], 20)
    if _answer(tried.output) != "[0, 1]":
        text = f"{where}; {found['launcher']} starts no two ranks: {tried.trouble() or last_words(tried.output)}"
        answers.row("MPI", "absent", text, **found)
        return
    answers.row("MPI", "ok", f"{where}; {' '.join(launcher)} starts two ranks in {tried.seconds:.1f} s", **found)
    answers.setting(launcher=launcher, library=found["library"])


def _tell_driver(answers: Answers) -> None:
    fields = "name,driver_version,compute_mode,memory.total,memory.used,mig.mode.current,clocks.max.sm"
    said = run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], 15)
    if said.code != 0:
        answers.row("driver", "absent", said.trouble())
        return
    answers.row("driver", "ok", f"{fields}: {' ; '.join(said.output.strip().splitlines())}")
    if "Exclusive" in said.output or "Prohibited" in said.output:
        answers.row("compute mode", "missed", "not Default: several ranks can't share this GPU")


def _tell_torch(answers: Answers) -> None:
    import torch

    if not torch.cuda.is_available():
        text = f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU: the other checks need one"
        answers.row("GPU", "absent", text)
        return
    of_gpu = torch.cuda.get_device_properties(0)
    gib = of_gpu.total_memory / 2**30
    answers.setting(device_name=of_gpu.name)
    text = (
        f"{of_gpu.name}, {gib:.1f} GiB, compute capability {of_gpu.major}.{of_gpu.minor}, "
        f"{of_gpu.multi_processor_count} multiprocessors, {torch.cuda.device_count()} visible; torch "
        f"{torch.__version__}, CUDA {torch.version.cuda}, UUID {getattr(of_gpu, 'uuid', 'unknown')}"
    )
    answers.row("GPU", "ok", text, name=of_gpu.name, memory_gib=round(gib, 1))
    try:
        import cupy

        runtime = cupy.cuda.runtime
        text = f"CuPy {cupy.__version__}, CUDA {runtime.runtimeGetVersion()}, driver {runtime.driverGetVersion()}"
        answers.row("CuPy", "ok", f"{text}; a sum on the GPU: {int(cupy.arange(10).sum())}")
    except Exception as error:
        answers.row("CuPy", "absent" if isinstance(error, ImportError) else "wrong", error_text(error))


# --- the contract ---


def _pytest_stub() -> types.ModuleType:
    """Enough of pytest for a file of tests to be imported: marks and fixtures leave a function as it is."""

    def leave(*_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda marked: marked

    class Marks:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            return leave

    stub = types.ModuleType("pytest")
    stub.fixture = leave  # type: ignore[attr-defined]
    stub.mark = Marks()  # type: ignore[attr-defined]
    stub.FixtureRequest = object  # type: ignore[attr-defined]
    return stub


def _load(path: Path) -> types.ModuleType:
    if "pytest" not in sys.modules and importlib.util.find_spec("pytest") is None:
        sys.modules["pytest"] = _pytest_stub()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _contracts(settings: Settings) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """(twin, name, check) of everything that tests/gpu holds; on the CPU of the host twin and the late one."""
    sys.path.insert(0, str(ROOT / "tests"))
    contract = importlib.import_module("device_contract")
    if settings["device"] == "cpu":
        from mpipipe.device import HostDevice

        contracts = _load(ROOT / "tests" / "contracts" / "test_device.py")
        twins: dict[str, Callable[[], Any]] = {
            "host": lambda: contract.Twin(HostDevice()),
            "late, staged": lambda: contracts.late_twin(1, True),
            "late, cuda-aware": lambda: contracts.late_twin(1, False),
        }
        for twin, make in twins.items():
            for name, function in contract.CHECKS.items():
                yield twin, name, lambda function=function, make=make: function(make())
        return
    gpu_tests = _load(ROOT / "tests" / "gpu" / "test_cuda_device.py")
    for staged in (True, False):
        twin = "staged" if staged else "cuda-aware"
        for name, function in contract.CHECKS.items():
            yield twin, name, lambda function=function, staged=staged: function(gpu_tests.Gpu(staged).twin())
        for name, function in list(vars(gpu_tests).items()):
            if name.startswith("test_") and function.__code__.co_varnames[: function.__code__.co_argcount] == ("gpu",):
                yield twin, name, lambda function=function, staged=staged: function(gpu_tests.Gpu(staged))


def check_contract(settings: Settings, answers: Answers) -> None:
    passed: dict[str, int] = {}
    failed: dict[str, int] = {}
    for twin, name, check in _contracts(settings):
        try:
            check()
            passed[twin] = passed.get(twin, 0) + 1
        except Exception as error:
            traceback.print_exc()
            failed[twin] = failed.get(twin, 0) + 1
            answers.row(f"{twin}: {name}", "wrong", error_text(error))
            if "CUDA" in str(error) and "error" in str(error).lower() and "memory" in str(error).lower():
                answers.row(twin, "wrong", "the rest was not tried: after such an error CUDA does nothing right")
                return
    for twin in {**passed, **failed}:
        count, of = passed.get(twin, 0), passed.get(twin, 0) + failed.get(twin, 0)
        answers.row(twin, "ok" if count == of else "wrong", f"{count} of {of} tests of the device passed", passed=count)


# --- messages out of GPU memory ---


def find_ucx(given: str | None) -> Path | None:
    """The folder with libucp.so.0: in ``given``, below it, or in the Python package libucx."""
    if given is not None:
        homes = [Path(given)]
    else:
        spec = importlib.util.find_spec("libucx")
        homes = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    for home in homes:
        for folder in (home, home / "lib", home / "libucx" / "lib"):
            if (folder / "libucp.so.0").exists():
                return folder
    return None


def ucx_environment(folder: Path, library: str) -> dict[str, str]:
    """What lets the MPI library of a Python wheel use another UCX, one that sees memory of a GPU."""
    paths = os.pathsep.join(filter(None, (str(folder), os.environ.get("LD_LIBRARY_PATH"))))
    found = {"LD_LIBRARY_PATH": paths, "UCX_WARN_UNUSED_ENV_VARS": "n"}
    if "open mpi" in library.lower():
        return found | {
            "OMPI_MCA_pml": "ucx",
            "OMPI_MCA_opal_common_ucx_tls": "any",
            "OMPI_MCA_opal_common_ucx_devices": "any",
        }
    return found | {"MPIR_CVAR_NOLOCAL": "1"}


def check_aware(settings: Settings, answers: Answers) -> None:
    """The pattern out of GPU memory, then the bits and the rate on that path: each in a launch of its own."""
    if settings["launcher"] is None:
        answers.row("route", "absent", "needs MPI ranks")
        return
    folder = find_ucx(settings["ucx"])
    more: dict[str, str] = {}
    if folder is not None:
        more = ucx_environment(folder, settings["library"])
        modules = sorted(path.name for path in folder.glob("ucx/libuct_cuda*"))
        shown = " ".join(f"{name}={value}" for name, value in more.items())
        level = "ok" if modules else "missed"
        answers.row("UCX", level, f"{folder}: CUDA modules: {', '.join(modules) or 'none'}; tried with {shown}")
    else:
        answers.row("UCX", "absent", "no libucx package and no --ucx: the MPI library is tried as it is")
    question = (
        "from mpipipe.transport import open_world; t = open_world(); "
        "t.rank or print('answer ' + '; '.join(f'{f.source}: {f.says}: {f.text}' for f in t.cuda_findings()), "
        "flush=True); t.close()"
    )
    said = launch(settings, 2, ["-c", question], min(30, left_s(settings)), more)
    text = said.trouble() or _answer(said.output) or "nothing"
    answers.row("MPI library says", "wrong" if said.trouble() else "ok", text)
    device = settings["device"]
    said = launch(settings, 2, ["-m", "mpipipe.transport.probe", device], min(40, left_s(settings) - 6), more)
    from mpipipe.transport.proof import ANSWER

    if said.code == 0 and f'{ANSWER}{{"right": true}}' in said.output:
        where = "GPU" if device == "cuda" else "host"
        answers.row("pattern", "ok", f"proved: messages out of {where} memory arrive right ({said.seconds:.1f} s)")
        _on_that_path(settings, answers, more)
    else:
        level = "missed" if folder is not None or device == "cpu" else "absent"
        answers.row("pattern", level, f"not proved: {said.trouble() or last_words(said.output)}")


def _on_that_path(settings: Settings, answers: Answers, more: dict[str, str]) -> None:
    from device_check_bits import SCHEDULES, bits_over_mpi
    from device_check_copies import rates_over_mpi

    path = "cuda-aware" if settings["device"] == "cuda" else "auto"
    bits_over_mpi(settings, answers, (2,), SCHEDULES[:1], path, more)
    if left_s(settings) > 8:
        rates_over_mpi(settings, answers, ["cuda-aware"] if settings["device"] == "cuda" else ["host memory"], more)


# --- the doctor ---


def check_doctor(settings: Settings, answers: Answers) -> None:
    gone = [name for name in VERBS_NEED[:2] if importlib.util.find_spec(name) is None]
    if gone:
        answers.row("doctor", "absent", f"not installed: {', '.join(gone)}")
        return
    arguments = ["-m", "mpipipe", "doctor"]
    limit = left_s(settings) - 6
    if settings["launcher"] is None:
        said = run([sys.executable, *arguments], limit)
    else:
        said = launch(settings, 2, arguments, limit)
    levels = {"ok": "ok", "warning": "missed", "missing": "absent", "wrong": "wrong"}
    for line in said.output.splitlines():
        level, _, rest = line.partition(" ")
        subject, found, text = rest.strip().partition(": ")
        if level in levels and found:
            answers.row(subject, levels[level], text)
    if said.trouble():
        answers.row("doctor", "wrong", said.trouble())
    else:
        ranks = 1 if settings["launcher"] is None else 2
        answers.row("doctor", "ok", f"ended well on {ranks} rank{'s' * (ranks > 1)} in {said.seconds:.1f} s")


if __name__ == "__main__":
    answer({"there": check_there, "contract": check_contract, "aware": check_aware, "doctor": check_doctor})
