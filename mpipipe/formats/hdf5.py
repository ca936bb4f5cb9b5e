"""The HDF5 habits of every file of a run: how it is opened, how text is kept, how kind and version are checked.

Files are written with the earliest library bounds: old tools read them, and a file whose writer was killed opens
without a repair tool. Locks are asked for but not needed: many cluster file systems have none.
"""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from mpipipe.errors import MpipipeError

SIGNATURE = b"\x89HDF\r\n\x1a\n"
"""What an HDF5 file begins with."""


def is_hdf5(path: str | Path) -> bool:
    """Whether a file begins as HDF5 does. Raises OSError where it can't be read."""
    with open(path, "rb") as file:
        return file.read(len(SIGNATURE)) == SIGNATURE


def open_file(path: str | Path, mode: str = "r", *, locking: bool | str = "best-effort") -> h5py.File:
    """Open an HDF5 file; ``mode`` as in h5py (``r``, ``r+``, ``w``, ``x``, ``a``).

    ``locking="best-effort"`` takes a lock where the file system has locks. Pass ``False`` to read a file that a run
    still writes. Raises OSError as h5py does (FileNotFoundError for a missing file).
    """
    return h5py.File(str(path), mode, libver="earliest", locking=locking)


def write_text(group: h5py.Group, name: str, text: str) -> None:
    """Keep ``text`` as a scalar dataset of variable-length UTF-8 (an attribute ends at 64 KiB; a dataset does not).

    A dataset of that name is replaced. Raises ValueError for a NUL character, which HDF5 would cut the text at.
    """
    if "\0" in text:
        raise ValueError(f"text for dataset {name!r} holds a NUL character; HDF5 strings end there")
    if name in group:
        del group[name]
    group.create_dataset(name, data=text, dtype=h5py.string_dtype("utf-8"))


def read_text(group: h5py.Group, name: str) -> str:
    """The text of a scalar string dataset. Raises KeyError if absent, TypeError if it is not text."""
    value = group[name][()]
    if isinstance(value, bytes | np.bytes_):
        return bytes(value).decode("utf-8")
    if isinstance(value, str):
        return value
    raise TypeError(f"dataset {group[name].name} holds {type(value).__name__}, not text")


def text_attribute(attributes: h5py.AttributeManager, name: str) -> str | None:
    """A text attribute as str, whether it was kept with fixed or variable length; None if absent or not text."""
    value = attributes.get(name)
    if isinstance(value, bytes | np.bytes_):
        return bytes(value).decode("utf-8", "replace")
    return str(value) if isinstance(value, str) else None


def write_format(file: h5py.File, format_name: str, version: int) -> None:
    """Mark a file with the attributes ``format`` (text) and ``version`` (integer) that :func:`check_format` reads."""
    file.attrs["format"] = format_name
    file.attrs["version"] = np.int64(version)


def check_format(file: h5py.File, format_name: str, version_supported: int, error_class: type[MpipipeError]) -> int:
    """The file's version, once its ``format`` is ``format_name`` and its version is 1 to ``version_supported``.

    Raises ``error_class`` naming the file, what was found and what is supported.
    """
    where = f"{file.filename}: group /"
    found = text_attribute(file.attrs, "format")
    if found != format_name:
        what = "no format attribute" if found is None else f"format {found!r}"
        raise error_class(f"{where}: {what} found, {format_name!r} version 1 to {version_supported} supported")
    version = file.attrs.get("version")
    if not isinstance(version, int | np.integer):
        raise error_class(f"{where}: {format_name!r} without a version number; 1 to {version_supported} supported")
    if not 1 <= int(version) <= version_supported:
        raise error_class(
            f"{where}: {format_name!r} version {int(version)} found, 1 to {version_supported} supported; "
            "a newer mpipipe wrote this file"
        )
    return int(version)


def text_dtype() -> np.dtype[np.object_]:
    """Variable-length UTF-8 as a numpy dtype."""
    dtype: np.dtype[np.object_] = h5py.string_dtype("utf-8")
    return dtype


def library_version() -> str:
    """Version of the HDF5 library that h5py brings."""
    return str(h5py.version.hdf5_version)
