"""Shards of a checkpoint: HDF5 files in which every tensor is one contiguous dataset with a checksum of its own.

The structure of a file is written through h5py; the bytes of the tensors are then written at the datasets' offsets by
plain system calls, in slices of at most 4 MiB. That holds no HDF5 lock while a disk is slow (a trace can go on), and a
full disk is an ``OSError`` here, where HDF5 would fail while it closes the file and could take the interpreter with it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xxhash

from mpipipe.errors import CheckpointCorruptError, CheckpointError, CheckpointIncompleteError
from mpipipe.formats import hdf5

SHARD_FORMAT = "mpipipe-checkpoint-shard"
SHARD_VERSION = 1
SLICE_BYTES = 4 * 2**20
BFLOAT16 = "bfloat16"

# Names of the element types on disk, all little-endian. bfloat16 is kept in numpy as its bits, in uint16.
_NUMPY_TYPES = {
    **{name: np.dtype(name).newbyteorder("<") for name in ("float16", "float32", "float64")},
    **{name: np.dtype(name).newbyteorder("<") for name in ("int8", "int16", "int32", "int64")},
    **{name: np.dtype(name).newbyteorder("<") for name in ("uint8", "uint16", "uint32", "uint64")},
    BFLOAT16: np.dtype("<u2"),
}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies. ``offset`` and ``nbytes`` are bytes in the file; ``dtype`` is numpy's name of the element
    type, or ``bfloat16``; ``checksum`` is ``xxh3:`` and the 16 hexadecimal digits of XXH3-64 over the tensor's
    little-endian bytes in C order.
    """

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int
    checksum: str


def numpy_type(dtype: str) -> np.dtype[Any] | None:
    """The little-endian numpy type for a name in a :class:`TensorEntry`; None for an unknown one. bfloat16 gives uint16
    (its bits).
    """
    return _NUMPY_TYPES.get(dtype)


def checksum_of(array: np.ndarray) -> str:
    """``xxh3:...`` of an array's little-endian bytes in C order."""
    digest = xxhash.xxh3_64()
    for piece in _slices(_bytes_of(_little_endian(array))):
        digest.update(piece)
    return f"xxh3:{digest.hexdigest()}"


def bytes_needed(tensors: Mapping[str, np.ndarray]) -> int:
    """An upper bound of a shard's size: the tensors, 2 KiB of structure for each, and 1 MiB."""
    return sum(array.nbytes for array in tensors.values()) + 2048 * len(tensors) + 2**20


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """Raise CheckpointError with both figures when the file system of ``folder`` has less than ``needed_bytes`` free
    for this user.
    """
    status = os.statvfs(folder)
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes < needed_bytes:
        raise CheckpointError(
            f"{folder}: a checkpoint needs {needed_bytes} bytes there and {free_bytes} are free; make room, keep fewer "
            "(checkpoint.keep_last), or set run.dir to another disk"
        )


def write_shard(
    path: str | Path,
    tensors: Mapping[str, np.ndarray],
    *,
    bfloat16: Collection[str] = (),
    attributes: Mapping[str, int | str] | None = None,
    config_text: str = "",
) -> list[TensorEntry]:
    """Write ``tensors`` (full dataset path, as ``/parameters/NAME`` -> array of any shape) into a new file, and to the
    disk itself.

    ``bfloat16`` names those whose arrays are uint16 holding bfloat16 bits. Returns an entry a tensor, in the mapping's
    order. Raises CheckpointError for too little free space, a name or an element type that can't be kept, and OSError
    from the file system (FileExistsError if ``path`` exists). A file left by an error is worth nothing; only a manifest
    makes it part of a checkpoint.
    """
    path = Path(path)
    check_free_space(path.parent, bytes_needed(tensors))
    offsets = _write_structure(path, tensors, bfloat16, attributes or {}, config_text)
    entries = []
    descriptor = os.open(path, os.O_RDWR)
    try:
        for name, array in tensors.items():
            data = _bytes_of(_little_endian(array))
            checksum = _write_bytes(descriptor, offsets[name], data)
            dtype = BFLOAT16 if name in bfloat16 else array.dtype.name
            shape = tuple(int(extent) for extent in array.shape)
            entries.append(TensorEntry(name, path.name, shape, dtype, offsets[name], len(data), checksum))
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)
    return entries


def check_tensor_name(name: str) -> None:
    """Raise CheckpointError unless ``name`` can be a dataset path: absolute, no empty, ``.`` or ``..`` part, no NUL,
    and not under ``/config`` or ``/scalars``, which have other uses."""
    parts = name.split("/")
    if len(parts) < 2 or parts[0] or any(part in ("", ".", "..") for part in parts[1:]) or "\0" in name:
        raise CheckpointError(f"tensor name {name!r} can't be a dataset path; use one like '/parameters/h.0.weight'")
    if parts[1] in ("config", "scalars"):
        raise CheckpointError(f"tensor name {name!r} can't be used: /{parts[1]} holds other things in a checkpoint")


def read_tensors(
    folder: str | Path, entries: Iterable[TensorEntry], *, verify: bool = True
) -> Iterator[tuple[TensorEntry, np.ndarray]]:
    """Each entry with its tensor, file by file in the order of the bytes; every file is opened once. Errors as
    :func:`read_tensor`.
    """
    by_file: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        by_file.setdefault(entry.file, []).append(entry)
    for file, members in sorted(by_file.items()):
        path = Path(folder) / file
        try:
            stream = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by the with below; the except is for the opening only
        except FileNotFoundError:
            raise CheckpointIncompleteError(f"{path}: the file is missing; it holds {members[0].name}") from None
        with stream:
            for entry in sorted(members, key=lambda entry: entry.offset):
                yield entry, _read_array(stream, path, entry, verify)


def read_tensor(folder: str | Path, entry: TensorEntry, *, verify: bool = True) -> np.ndarray:
    """One tensor as a new array of ``entry.shape`` (bfloat16: its bits, uint16), read at its offset.

    Raises CheckpointIncompleteError when the file is missing or ends before the tensor does, CheckpointCorruptError
    when the bytes do not have the entry's checksum (not looked at with ``verify=False``).
    """
    return next(array for _, array in read_tensors(folder, [entry], verify=verify))


def shard_problems(path: str | Path, entries: Iterable[TensorEntry]) -> list[str]:
    """What is wrong with a shard as an HDF5 file: one line for each dataset that is not what its entry says. Reads no
    tensor bytes.
    """
    problems = []
    try:
        with hdf5.open_file(path) as file:
            hdf5.check_format(file, SHARD_FORMAT, SHARD_VERSION, CheckpointCorruptError)
            for entry in entries:
                dataset = file.get(entry.name)
                if not isinstance(dataset, h5py.Dataset):
                    problems.append(f"{path}: dataset {entry.name} is not there")
                    continue
                offset = dataset.id.get_offset() if entry.nbytes else entry.offset
                type_agrees = dataset.id.get_type() == _hdf5_type(entry.dtype)
                if dataset.shape != entry.shape or offset != entry.offset or not type_agrees:
                    problems.append(
                        f"{path}: dataset {entry.name} is {dataset.dtype} {dataset.shape} at byte {offset}; the "
                        "manifest says "
                        f"{entry.dtype} {entry.shape} at byte {entry.offset}"
                    )
    except (OSError, RuntimeError, KeyError, CheckpointCorruptError) as error:
        problems.append(f"{path}: not readable as HDF5: {error}")
    return problems


def _write_structure(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    bfloat16: Collection[str],
    attributes: Mapping[str, int | str],
    config: str,
) -> dict[str, int]:
    """The file with every dataset allocated and not one tensor byte written: the offset of each dataset in it."""
    unknown = sorted(set(bfloat16) - set(tensors))
    if unknown:
        raise CheckpointError(f"bfloat16 names {unknown[0]!r}, which is not among the tensors to be written")
    types = {name: _type_name(name, array, name in bfloat16) for name, array in tensors.items()}
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    linking = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    linking.set_create_intermediate_group(True)
    linking.set_char_encoding(h5py.h5t.CSET_UTF8)
    offsets = {}
    with hdf5.open_file(path, "x") as file:
        hdf5.write_format(file, SHARD_FORMAT, SHARD_VERSION)
        for key, value in attributes.items():
            file.attrs[key] = value
        hdf5.write_text(file, "config", config)
        for name, array in tensors.items():
            space = h5py.h5s.create_simple(array.shape) if array.shape else h5py.h5s.create(h5py.h5s.SCALAR)
            try:
                dataset = h5py.h5d.create(
                    file.id, name.encode(), _hdf5_type(types[name]), space, dcpl=creation, lcpl=linking
                )
            except (ValueError, RuntimeError) as error:
                raise CheckpointError(
                    f"tensor name {name!r} can't stand beside the other names of the shard: {error}"
                ) from None
            offsets[name] = int(dataset.get_offset() or 0)
    return offsets


def _type_name(name: str, array: np.ndarray, is_bfloat16: bool) -> str:
    check_tensor_name(name)
    dtype = array.dtype.name
    if is_bfloat16 and dtype != "uint16":
        raise CheckpointError(f"{name}: bfloat16 is given as its bits in uint16, not as {dtype}")
    if dtype not in _NUMPY_TYPES:
        raise CheckpointError(f"{name}: element type {dtype} can't be kept (allowed: {', '.join(_NUMPY_TYPES)})")
    return BFLOAT16 if is_bfloat16 else dtype


def _hdf5_type(dtype: str) -> h5py.h5t.TypeID:
    if dtype != BFLOAT16:
        return h5py.h5t.py_create(_NUMPY_TYPES[dtype])
    # Equal to the bfloat16 of HDF5 2.0, and a plain float to older tools: sign bit 15, exponent bits 7-14, mantissa
    # bits 0-6.
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_size(2)
    kind.set_ebias(127)
    return kind


def _little_endian(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _slices(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), SLICE_BYTES):
        yield data[start : start + SLICE_BYTES]


def _write_bytes(descriptor: int, offset: int, data: memoryview) -> str:
    """Write ``data`` at ``offset``; the checksum of what was written."""
    digest = xxhash.xxh3_64()
    for piece in _slices(data):
        digest.update(piece)
        done = 0
        while done < len(piece):
            done += os.pwrite(descriptor, piece[done:], offset + done)
        offset += len(piece)
    return f"xxh3:{digest.hexdigest()}"


def _read_array(stream: Any, path: Path, entry: TensorEntry, verify: bool) -> np.ndarray:
    array = np.empty(entry.shape, dtype=_NUMPY_TYPES[entry.dtype])
    data = _bytes_of(array)
    digest = xxhash.xxh3_64()
    stream.seek(entry.offset)
    for piece in _slices(data):
        done = 0
        while done < len(piece):
            count = stream.readinto(piece[done:])
            if not count:
                raise CheckpointIncompleteError(
                    f"{path}: the file ends before {entry.name} does (bytes {entry.offset} to "
                    f"{entry.offset + entry.nbytes})"
                )
            done += count
        if verify:
            digest.update(piece)
    found = f"xxh3:{digest.hexdigest()}"
    if verify and found != entry.checksum:
        raise CheckpointCorruptError(
            f"{path}: {entry.name} has the checksum {found}; the manifest says {entry.checksum}"
        )
    return array
