"""From ``comm.device`` to a device."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from pathlib import Path

import torch

from mpipipe.device.binding import choose_device
from mpipipe.device.host import HostDevice
from mpipipe.device.protocol import Device
from mpipipe.device.streams import StreamDevice
from mpipipe.errors import DeviceBindingError, MissingDependencyError, SetupError

_log = logging.getLogger(__name__)

_NO_CUPY = "CuPy is not installed: pip install 'mpipipe[{extra}]'"


def open_device(name: str, *, local_rank: int = 0, local_size: int = 1, staged: bool = True) -> Device:
    """The device for ``comm.device``: ``"cpu"``, ``"cuda"``, or ``"auto"``: a GPU where there is all that one needs.

    ``local_rank`` of ``local_size`` ranks on this node choose among several GPUs. ``staged``: messages leave a GPU
    through host memory; without it the MPI library must take device pointers. CuPy is imported for a GPU alone, after
    the MPI library.

    Raises ``MissingDependencyError`` where CuPy or CUDA in torch is missing, ``DeviceBindingError`` where no GPU is,
    ``SetupError`` for another name.
    """
    if device_kind(name) == "cpu":
        return HostDevice()
    return _open_gpu(choose_device(torch.cuda.device_count(), local_rank, local_size), staged)


def device_kind(name: str) -> str:
    """``"cpu"`` or ``"cuda"``: what ``open_device(name)`` opens. Opens none, and raises as that. Imports CuPy where all
    else is there, to see whether it can be.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise SetupError(f'comm.device = {name!r}: there are "auto", "cpu" and "cuda"')
    if name == "cpu":
        return "cpu"
    packages, gpu = _missing()
    if packages or gpu:
        if name == "auto":
            if next(Path("/dev").glob("nvidia[0-9]*"), None) is not None:
                text = "this node has an NVIDIA device, and this rank computes on the CPU"
                _log.warning("%s: %s", text, _said(packages, gpu))
            return "cpu"
        raise _not_there(packages, gpu)
    try:
        importlib.import_module("cupy")
    except ImportError as error:
        text = f"CuPy is installed and can't be imported ({error}): pip install 'mpipipe[{_extra()}]'"
        if name == "auto":
            _log.warning("%s. This rank computes on the CPU", text)
            return "cpu"
        raise MissingDependencyError(f'comm.device = "cuda": {text}') from error
    return "cuda"


def _said(packages: list[str], gpu: list[str]) -> str:
    return "; ".join([*packages, *gpu])


def _not_there(packages: list[str], gpu: list[str]) -> Exception:
    error = MissingDependencyError if packages else DeviceBindingError
    return error(f'comm.device = "cuda": {_said(packages, gpu)}. Without a GPU use comm.device = "cpu"')


def _open_gpu(index: int, staged: bool) -> Device:
    from mpipipe.device.cuda import CudaDriver

    return StreamDevice(CudaDriver(index), staged)


def _missing() -> tuple[list[str], list[str]]:
    """What a GPU needs and is not there: packages, and the GPU itself, in words."""
    if torch.version.cuda is None:
        without = [f"torch {torch.__version__} was built without CUDA: install torch for your GPU's CUDA version"]
        return without + ([] if _has_cupy() else [_NO_CUPY.format(extra="cuda12")]), []
    packages = [] if _has_cupy() else [_NO_CUPY.format(extra=_extra())]
    if torch.cuda.is_available():
        return packages, []
    return packages, ["torch finds no GPU that it can use (see nvidia-smi and CUDA_VISIBLE_DEVICES)"]


def _has_cupy() -> bool:
    return importlib.util.find_spec("cupy") is not None


def _extra() -> str:
    """The extra that brings CuPy for the CUDA version of this torch."""
    return "cuda13" if (torch.version.cuda or "12").split(".")[0] == "13" else "cuda12"
