"""What an MPI library says of GPU memory: fake libraries, fake maps, and a verdict over all of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpipipe.transport import awareness
from mpipipe.transport.awareness import Finding, ask, mapped_libraries, mpi_libraries, verdict

MPICH = "/opt/mpich/lib/libmpi.so.12"
OPEN_MPI = "/opt/openmpi/lib/libmpi.so.40"
CRAY = "/opt/cray/lib/libmpi_gnu_123.so.12"
GTL = "/opt/cray/lib/libmpi_gtl_cuda.so.0"
UCX = "/opt/ucx/lib/libucp.so.0"
UCX_CUDA = "/opt/ucx/lib/ucx/libuct_cuda.so.0"


def gpu_query(answer: int, code: int = 0) -> Callable[[int, Any], int]:
    """``MPIX_GPU_query_support``, of which only kind 0, CUDA, is asked."""

    def query(kind: int, flag: Any) -> int:
        assert kind == 0
        if answer >= 0:
            flag._obj.value = answer
        return code

    return query


def answers(
    *mapped: str,
    functions: dict[str, Any] | None = None,
    kinds: str | None = None,
    version: str = "MPICH Version: 5.0.2",
    **environ: str,
) -> dict[str, tuple[str, bool]]:
    """Source to what it says and whether it warns."""
    opened: list[str] = []

    def load(path: str) -> Any:
        opened.append(path)
        return SimpleNamespace(**(functions or {}))

    found = ask(version, kinds, environ=environ, mapped=mapped, load=load)
    assert set(opened) <= set(mpi_libraries(mapped))
    assert len({finding.source for finding in found}) == len(found)
    return {finding.source: (finding.says, finding.warns) for finding in found}


def test_nothing_known_says_nothing() -> None:
    assert answers() == {}
    assert verdict([]).says == "unknown"


@pytest.mark.parametrize(
    "value, says, warns",
    [("1", "yes", False), ("0", "no", False), ("yes", "unknown", True), ("", "unknown", True)],
)
def test_the_user_s_own_word(value: str, says: str, warns: bool) -> None:
    assert answers(MPIPIPE_CUDA_AWARE=value) == {"MPIPIPE_CUDA_AWARE": (says, warns)}


@pytest.mark.parametrize(
    "kinds, says",
    [
        ("mpi,system", "no"),
        ("mpi,system,cuda", "yes"),
        ("system, cuda:device", "yes"),
        ("rocm:device,level_zero", "no"),
        ("cudaish", "no"),
        ("", "no"),
    ],
)
def test_the_kinds_of_memory_that_mpi_takes(kinds: str, says: str) -> None:
    assert answers(kinds=kinds) == {"mpi_memory_alloc_kinds": (says, False)}


@pytest.mark.parametrize(
    "functions, found",
    [
        ({}, {}),
        ({"MPIX_Query_cuda_support": lambda: 1}, {"MPIX_Query_cuda_support": "yes"}),
        ({"MPIX_Query_cuda_support": lambda: 0}, {"MPIX_Query_cuda_support": "no"}),
        ({"MPIX_Query_cuda_support": lambda: -1}, {"MPIX_Query_cuda_support": "unknown"}),
        ({"MPIX_GPU_query_support": gpu_query(1)}, {"MPIX_GPU_query_support": "yes"}),
        ({"MPIX_GPU_query_support": gpu_query(0)}, {"MPIX_GPU_query_support": "no"}),
        ({"MPIX_GPU_query_support": gpu_query(1, code=5)}, {"MPIX_GPU_query_support": "unknown"}),
        ({"MPIX_GPU_query_support": gpu_query(-1)}, {"MPIX_GPU_query_support": "unknown"}),
        (
            {"MPIX_GPU_query_support": gpu_query(0), "MPIX_Query_cuda_support": lambda: 1},
            {"MPIX_GPU_query_support": "no", "MPIX_Query_cuda_support": "yes"},
        ),
    ],
)
def test_the_functions_of_the_loaded_library(functions: dict[str, Any], found: dict[str, str]) -> None:
    expected = {source: (says, False) for source, says in found.items()}
    assert answers(MPICH, "/lib/libc.so.6", functions=functions) == expected


def test_a_library_that_can_not_be_opened_says_nothing() -> None:
    def load(path: str) -> Any:
        raise OSError(path)

    assert ask("MPICH", None, environ={}, mapped=[MPICH], load=load) == []


def test_two_libraries_of_one_mpi_are_asked_once() -> None:
    found = answers(MPICH, "/opt/mpich/lib/libmpi_abi.so.1", functions={"MPIX_Query_cuda_support": lambda: 1})
    assert found == {"MPIX_Query_cuda_support": ("yes", False)}


@pytest.mark.parametrize(
    "mapped, environ, version, found",
    [
        ([CRAY, GTL], {"MPICH_GPU_SUPPORT_ENABLED": "1"}, "MPI VERSION : CRAY MPICH version 8.1.28", ("yes", False)),
        ([CRAY], {"MPICH_GPU_SUPPORT_ENABLED": "1"}, "MPI VERSION : CRAY MPICH version 8.1.28", ("no", True)),
        ([CRAY, GTL], {}, "MPI VERSION : CRAY MPICH version 8.1.28", ("no", True)),
        ([CRAY], {"MPICH_GPU_SUPPORT_ENABLED": "0"}, "MPI VERSION : CRAY MPICH version 8.1.28", ("no", False)),
        ([MPICH], {}, "MPICH Version: 5.0.2", None),
    ],
)
def test_cray_needs_its_switch_and_its_library(
    mapped: list[str], environ: dict[str, str], version: str, found: tuple[str, bool] | None
) -> None:
    expected = {} if found is None else {"MPICH_GPU_SUPPORT_ENABLED": found}
    assert answers(*mapped, version=version, **environ) == expected


@pytest.mark.parametrize("name", ["MV2_USE_CUDA", "PSP_CUDA", "I_MPI_OFFLOAD"])
def test_the_switches_of_other_libraries(name: str) -> None:
    assert answers(**{name: "1"}) == {name: ("yes", False)}
    assert answers(**{name: "0"}) == {name: ("no", False)}


@pytest.mark.parametrize(
    "chosen, found",
    [
        (None, {"UCX": ("yes", False)}),
        ("all", {"UCX": ("yes", False)}),
        ("rc,sm,cuda", {"UCX": ("yes", False)}),
        ("self,sm,cuda_copy,cuda_ipc", {"UCX": ("yes", False)}),
        ("^ib", {"UCX": ("yes", False)}),
        ("^cuda", {"UCX_TLS": ("no", True)}),
        ("tcp,self", {"UCX_TLS": ("no", True)}),
    ],
)
def test_a_ucx_with_cuda_may_take_what_mpi_denies(chosen: str | None, found: dict[str, Any]) -> None:
    environ = {} if chosen is None else {"UCX_TLS": chosen}
    assert answers(OPEN_MPI, UCX, UCX_CUDA, **environ) == found


def test_a_ucx_without_cuda_can_not(tmp_path: Path) -> None:
    core = tmp_path / "libucp.so.0"
    assert answers(str(core), UCX_TLS="tcp") == {"UCX": ("no", False)}


@pytest.mark.parametrize("place", ["ucx/libuct_cuda.so.0", "libuct_cuda-1a2b3c.so.0.0.0"])
def test_a_module_beside_ucx_counts_before_it_is_loaded(place: str, tmp_path: Path) -> None:
    module = tmp_path / place
    module.parent.mkdir(exist_ok=True)
    module.touch()
    assert answers(str(tmp_path / "libucp.so.0")) == {"UCX": ("yes", False)}


MAPS = f"""\
00400000-00401000 r-xp 00000000 fe:00 1 /usr/bin/python3.12
7f00-7f01 r--p 00000000 fe:00 2                          {MPICH}
7f01-7f02 r-xp 00001000 fe:00 2                          {MPICH}
7f02-7f03 r-xp 00001000 fe:00 3                          /opt/with a space/libucp-1a2b.so.0.0.0
7f03-7f04 rw-p 00000000 00:00 0
7f05-7f06 rw-s 00000000 00:19 9                          /dev/shm/so.much
7f07-7f08 rw-p 00000000 00:00 0                          [heap]
7f09-7f0a r-xp 00000000 fe:00 4                          {GTL} (deleted)
"""


def test_the_libraries_of_this_process(tmp_path: Path) -> None:
    (tmp_path / "maps").write_text(MAPS)
    assert mapped_libraries(tmp_path / "maps") == [MPICH, "/opt/with a space/libucp-1a2b.so.0.0.0"]
    assert mapped_libraries(tmp_path / "none") == []
    assert any("libc" in path for path in mapped_libraries())


@pytest.mark.parametrize(
    "name, is_mpi",
    [
        ("libmpi.so.12", True),
        ("libmpi.so", True),
        ("libmpi_abi.so.1", True),
        ("libmpich.so.12", True),
        ("libmpi_gnu_123.so.12", True),
        ("libmpi_nvidia.so.12", True),
        ("libmpi_gtl_cuda.so.0", False),
        ("libmpipipe.txt", False),
        ("MPI.mpich.cpython-312-x86_64-linux-gnu.so", False),
        ("libucp.so.0", False),
    ],
)
def test_which_libraries_are_mpi_s(name: str, is_mpi: bool) -> None:
    assert mpi_libraries([f"/a/libmpi/{name}"]) == ([f"/a/libmpi/{name}"] if is_mpi else [])


YES, NO = Finding("one", "yes", "it does"), Finding("two", "no", "it does not")
UNKNOWN = Finding("three", "unknown", "")
OTHER_YES, OTHER_NO = Finding("four", "yes", "so it is"), Finding("five", "no", "so it is not")


@pytest.mark.parametrize(
    "findings, says, source",
    [
        ([NO, UNKNOWN], "no", "two"),
        ([NO, YES, OTHER_NO, OTHER_YES], "yes", "one, four"),
        ([UNKNOWN], "unknown", "the MPI library"),
        ([Finding(awareness.OVERRIDE, "no", ""), YES], "no", awareness.OVERRIDE),
        ([NO, Finding(awareness.OVERRIDE, "yes", "")], "yes", awareness.OVERRIDE),
        ([Finding(awareness.OVERRIDE, "unknown", ""), NO], "no", "two"),
    ],
)
def test_the_verdict(findings: list[Finding], says: str, source: str) -> None:
    found = verdict(findings)
    assert (found.says, found.source) == (says, source)
