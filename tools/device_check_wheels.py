"""Python packages that ``device_check.py`` brings along as wheels, for a machine on which nothing can be installed.

Fill the folder elsewhere, for the Python of that machine, with what it lacks:

    pip download --no-deps --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64 \\
        --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --dest wheels xxhash h5py pydantic pydantic-core \\
        annotated-types typing-inspection typing-extensions mpi4py mpich libucx-cu13

Static libraries (``*.a``, ``*.la``) of a wheel may be deleted from it, for a smaller folder.
The wheels are unpacked into a temporary folder that looks like an installation, ``bin`` and ``lib`` beside the
packages. What the machine has by itself is left out.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path


def is_installed(name: str) -> bool:
    """Whether this Python has a package of that name, whatever version."""
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def unpack(folder: Path, prefix: Path) -> list[str]:
    """Unpack the wheels of ``folder`` into ``prefix``; what was done with each, in words."""
    site, told = prefix / "site", []
    site.mkdir(parents=True, exist_ok=True)
    wheels = sorted(folder.glob("*.whl"))
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        if is_installed(name):
            told.append(f"{name} {version} left out, it is installed here")
            continue
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        except (OSError, zipfile.BadZipFile) as error:
            told.append(f"{wheel.name} can't be unpacked: {error}")
            continue
        told.append(f"{name} {version} unpacked")
    for data in site.glob("*.data"):
        places = {"data": prefix, "scripts": prefix / "bin", "purelib": site, "platlib": site}
        for part, place in places.items():
            if (data / part).is_dir():
                shutil.copytree(data / part, place, dirs_exist_ok=True)
        shutil.rmtree(data)
    for program in (prefix / "bin").glob("*"):
        program.chmod(0o755)  # an archive of this kind keeps no rights when it is unpacked
    return told or [f"no wheel in {folder}"]


def environment(prefix: Path, given: Mapping[str, str]) -> dict[str, str]:
    """The variables by which Python and MPI find what was unpacked: behind what the machine has, where there is an
    order.
    """
    paths = [given.get("PYTHONPATH", ""), str(prefix / "site")]
    found = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if (prefix / "bin").is_dir():
        found["PATH"] = os.pathsep.join([given.get("PATH", os.defpath), str(prefix / "bin")])
    for name in ("libmpi.so.12", "libmpi.so.40"):  # MPICH's, Open MPI's
        library = prefix / "lib" / name
        if library.exists() and "MPI4PY_LIBMPI" not in given:
            found["MPI4PY_LIBMPI"] = str(library)
            if name.endswith(".40"):
                found["OPAL_PREFIX"] = str(prefix)
    return found
