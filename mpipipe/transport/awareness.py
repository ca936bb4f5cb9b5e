"""What an MPI library says of memory of a GPU: whether it takes device pointers (is CUDA-aware).

No answer is a proof. The queries tell how the MPI library was built, while UCX, below it, looks at each pointer by
itself: with another UCX than it was built with, a library that says no may take them, and one that says yes may not.
What may be so is proved by a message (``mpipipe.transport.proof``). Imports no mpi4py: mpi.py asks MPI.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

Says: TypeAlias = Literal["yes", "no", "unknown"]

OVERRIDE = "MPIPIPE_CUDA_AWARE"
"""The variable by which the user answers: ``0`` or ``1``."""

KINDS_KEY = "mpi_memory_alloc_kinds"
"""MPI 4.1, section 11.4.3: kinds of memory that the library takes, as ``mpi,system,cuda``."""

_GPU_SUPPORT_CUDA = 0
"""``MPIX_GPU_SUPPORT_CUDA`` of MPICH's mpi.h."""

_UCX_SEES_GPUS = ("cuda", "gdr_copy", "all")
"""What transports in ``UCX_TLS`` begin with, one of which lets UCX see memory of a GPU."""

Load: TypeAlias = Callable[[str], Any]
"""A mapped library, with its functions as attributes: ``ctypes.CDLL``."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer. ``source``: who says it, a variable or a function; ``text``: a sentence about it, without a full
    stop; ``warns``: something there wants to be changed.
    """

    source: str
    says: Says
    text: str
    warns: bool = False


def mapped_libraries(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Paths of the shared libraries that this process has loaded, each once, in order; nothing where that can't be
    read.
    """
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    paths = [line.split(maxsplit=5)[5] for line in lines if line.count("/") and len(line.split(maxsplit=5)) == 6]
    return list(dict.fromkeys(path for path in paths if re.search(r"\.so(\.[0-9.]+)?$", path)))


def mpi_libraries(mapped: Sequence[str]) -> list[str]:
    """Those of ``mapped`` that are an MPI library's, as ``libmpi.so.40``, ``libmpich.so.12``, ``libmpi_cray.so.12``."""
    return [path for path in mapped if re.match(r"libmpi(?!_gtl)[a-z0-9_]*\.so", path.rpartition("/")[2])]


def ask(
    library: str,
    memory_kinds: str | None,
    *,
    environ: Mapping[str, str] | None = None,
    mapped: Sequence[str] | None = None,
    load: Load = ctypes.CDLL,
) -> list[Finding]:
    """Every answer there is. ``library``: first line of the library's version; ``memory_kinds``: value of KINDS_KEY,
    None where the library does not know it. To be asked after MPI has begun. The rest defaults to this process.
    """
    given = os.environ if environ is None else environ
    loaded = mapped_libraries() if mapped is None else mapped
    return [
        *_override(given),
        *_kinds(memory_kinds),
        *_queries(loaded, load),
        *_vendors(library, given, loaded),
        *_ucx(given, loaded),
    ]


def verdict(findings: Sequence[Finding]) -> Finding:
    """All answers in one. The override decides; else one yes is enough, since queries err towards no and a yes is
    proved before it is believed; then one no.
    """
    for finding in findings:
        if finding.source == OVERRIDE and finding.says != "unknown":
            return finding
    for says in ("yes", "no"):
        heard = [finding for finding in findings if finding.says == says]
        if heard:
            return Finding(", ".join(finding.source for finding in heard), heard[0].says, heard[0].text)
    return Finding("the MPI library", "unknown", "the MPI library does not say whether it takes memory of a GPU")


def _override(given: Mapping[str, str]) -> Iterator[Finding]:
    asked = given.get(OVERRIDE)
    if asked is None:
        return
    if asked not in ("0", "1"):
        yield Finding(OVERRIDE, "unknown", f"{OVERRIDE}={asked} is neither 0 nor 1, and has no effect", warns=True)
    else:
        yield Finding(OVERRIDE, "yes" if asked == "1" else "no", f"{OVERRIDE}={asked} says so")


def _kinds(memory_kinds: str | None) -> Iterator[Finding]:
    if memory_kinds is not None:
        kinds = [kind.strip().split(":")[0] for kind in memory_kinds.split(",")]
        yield Finding(KINDS_KEY, "yes" if "cuda" in kinds else "no", f"the library takes {memory_kinds}")


def _queries(loaded: Sequence[str], load: Load) -> Iterator[Finding]:
    """The functions of MPICH and Intel MPI, and of Open MPI, in the library that is loaded."""
    asked: set[str] = set()
    for path in mpi_libraries(loaded):
        try:
            library = load(path)
        except OSError:
            continue
        for name, call in (("MPIX_GPU_query_support", _gpu_query), ("MPIX_Query_cuda_support", _cuda_query)):
            function = getattr(library, name, None)
            if function is None or name in asked:
                continue
            asked.add(name)
            answer = call(function)
            says: Says = "unknown" if answer is None else "yes" if answer else "no"
            words = {"yes": "was built for", "no": "was built without", "unknown": "does not say whether it has"}
            yield Finding(name, says, f"{path.rpartition('/')[2]} {words[says]} CUDA")


def _gpu_query(function: Any) -> bool | None:
    flag = ctypes.c_int(-1)
    code = function(_GPU_SUPPORT_CUDA, ctypes.byref(flag))
    return None if code != 0 or flag.value < 0 else bool(flag.value)


def _cuda_query(function: Any) -> bool | None:
    answer = function()
    return bool(answer) if answer in (0, 1) else None


def _vendors(library: str, given: Mapping[str, str], loaded: Sequence[str]) -> Iterator[Finding]:
    """What the switches of libraries that have one say."""
    gtl = any("libmpi_gtl_cuda" in path for path in loaded)
    switch = given.get("MPICH_GPU_SUPPORT_ENABLED")
    if switch == "1" and gtl:
        yield Finding("MPICH_GPU_SUPPORT_ENABLED", "yes", "MPICH_GPU_SUPPORT_ENABLED=1, and libmpi_gtl_cuda is loaded")
    elif switch == "1":
        text = (
            "MPICH_GPU_SUPPORT_ENABLED=1, but libmpi_gtl_cuda is not loaded, which Cray MPICH needs: "
            "name it in LD_PRELOAD"
        )
        yield Finding("MPICH_GPU_SUPPORT_ENABLED", "no", text, warns=True)
    elif gtl or "cray mpich" in library.lower():
        text = "Cray MPICH takes memory of a GPU only with MPICH_GPU_SUPPORT_ENABLED=1 (and libmpi_gtl_cuda loaded)"
        yield Finding("MPICH_GPU_SUPPORT_ENABLED", "no", text, warns=gtl)
    for name in ("MV2_USE_CUDA", "PSP_CUDA", "I_MPI_OFFLOAD"):
        value = given.get(name)
        if value is not None:
            yield Finding(name, "no" if value in ("0", "") else "yes", f"{name}={value}")


def _ucx(given: Mapping[str, str], loaded: Sequence[str]) -> Iterator[Finding]:
    """Whether the UCX that is loaded can see memory of a GPU. Whether MPI uses it, a proof tells."""
    cores = [path for path in loaded if path.rpartition("/")[2].startswith(("libucp.", "libucp-"))]
    if not cores:
        return
    modules = [path for path in loaded if "libuct_cuda" in path] or list(_modules_beside(cores))
    if not modules:
        yield Finding("UCX", "no", f"the UCX that is loaded ({cores[0]}) has no CUDA module")
        return
    chosen = given.get("UCX_TLS")
    if chosen is not None and not _sees_gpus(chosen):
        text = f"UCX_TLS={chosen} leaves out cuda, so that UCX does not see memory of a GPU: add cuda, or unset it"
        yield Finding("UCX_TLS", "no", text, warns=True)
        return
    text = f"the UCX that is loaded has CUDA modules ({modules[0]}), whatever the MPI library was built for"
    yield Finding("UCX", "yes", text)


def _modules_beside(cores: Sequence[str]) -> Iterator[str]:
    for core in cores:
        folder = Path(core).parent
        for found in (*sorted(folder.glob("ucx/libuct_cuda*.so*")), *sorted(folder.glob("libuct_cuda*.so*"))):
            yield str(found)


def _sees_gpus(chosen: str) -> bool:
    """``UCX_TLS``: a list of transports, or with ``^`` in front all but these."""
    names = [name.strip() for name in chosen.removeprefix("^").split(",")]
    if chosen.startswith("^"):
        return "cuda" not in names and "cuda_copy" not in names
    return any(name.startswith(_UCX_SEES_GPUS) for name in names)
