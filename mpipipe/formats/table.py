"""Schedule tables as HDF5, arrays in and arrays out; what the numbers mean is the schedule room's business.

Letters: p = num_ranks, v = chunks_per_rank, m = num_microbatches, A = number of actions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import xxhash
from numpy.typing import NDArray

from mpipipe.errors import TableFileError
from mpipipe.formats.hdf5 import check_format, open_file, text_attribute

FORMAT = "mpipipe-schedule"
VERSION = 1

_DTYPES: dict[str, np.dtype[Any]] = {
    "placement": np.dtype("<i4"),
    "mirror": np.dtype("<i4"),
    "offsets": np.dtype("<i8"),
    "kinds": np.dtype("u1"),
    "stages": np.dtype("<i2"),
    "microbatches": np.dtype("<i4"),
    "overlaps": np.dtype("<i8"),
}
_NUMBERS = ("p", "v", "m")


class StoredTable(NamedTuple):
    """A table as it is stored. ``placement`` (p*v,), ``mirror`` the same or None; ``offsets`` (p+1,); ``kinds``,
    ``stages``, ``microbatches`` (A,); ``overlaps`` (n,); ``extras``: (rank, row, text) each."""

    name: str
    p: int
    v: int
    m: int
    lowered: bool
    placement: NDArray[np.int32]
    mirror: NDArray[np.int32] | None
    offsets: NDArray[np.int64]
    kinds: NDArray[np.uint8]
    stages: NDArray[np.int16]
    microbatches: NDArray[np.int32]
    overlaps: NDArray[np.int64]
    extras: tuple[tuple[int, int, str], ...] = ()


def write_table(path: str | Path, table: StoredTable) -> None:
    """Write ``table`` to a file at ``path``. Raises OSError as h5py does.

    Texts have a fixed length: HDF5 keeps those of any length in a heap, and reading a damaged heap may never end.
    """
    with open_file(path, "w") as file:
        _write_text(file, "format", FORMAT)
        file.attrs["version"] = np.int64(VERSION)
        _write_text(file, "name", table.name)
        for name in _NUMBERS:
            file.attrs[name] = np.int64(getattr(table, name))
        file.attrs["lowered"] = np.bool_(table.lowered)
        for name, dtype in _DTYPES.items():
            array = getattr(table, name)
            if array is not None:
                file.create_dataset(name, data=np.asarray(array, dtype=dtype))
        if table.extras:
            ranks, rows, texts = zip(*table.extras, strict=True)
            group = file.create_group("extras")
            group.create_dataset("rank", data=np.asarray(ranks, dtype=np.int32))
            group.create_dataset("row", data=np.asarray(rows, dtype=np.int64))
            encoded = [text.encode() for text in texts]
            group.create_dataset("text", data=encoded, dtype=_fixed(max(map(len, encoded))))
        _write_text(file, "checksum", _checksum(table))


def _write_text(file: h5py.File, name: str, text: str) -> None:
    data = text.encode()
    file.attrs.create(name, data, dtype=_fixed(len(data)))


def _fixed(length: int) -> Any:
    """UTF-8 text of a fixed length in bytes; HDF5 has none of length 0."""
    return h5py.string_dtype("utf-8", max(1, length))


def read_table(path: str | Path) -> StoredTable:
    """The table of a file. Raises TableFileError, naming file and object, for a file that is cut, of another format or
    newer, lacks something, or whose bytes do not have the checksum that it gives.

    Shapes and number ranges of single arrays are checked; whether the arrays fit each other is not.
    """
    with _opened(Path(path)) as file:
        check_format(file, FORMAT, VERSION, _error_class(path))
        numbers: dict[str, Any] = {name: _number(file, name) for name in _NUMBERS}
        lowered = file.attrs.get("lowered")
        if not isinstance(lowered, bool | np.bool_):
            raise _Unfit("the attribute lowered is missing or is no boolean")
        arrays: dict[str, Any] = {name: _array(file, name, dtype) for name, dtype in _DTYPES.items()}
        name = text_attribute(file.attrs, "name")
        if name is None:
            raise _Unfit("the attribute name is missing or is no text")
        table = StoredTable(name=name, lowered=bool(lowered), extras=_extras(file), **numbers, **arrays)
        given = file.attrs.get("checksum")
        if given is not None and text_attribute(file.attrs, "checksum") != _checksum(table):
            raise _Unfit("the contents do not have the checksum that the file gives: it was damaged or changed")
    return table


def holds_table(path: str | Path) -> bool:
    """True for an HDF5 file whose attribute ``format`` is that of a schedule table."""
    try:
        with open_file(path) as file:
            return text_attribute(file.attrs, "format") == FORMAT
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return False


class _Unfit(Exception):
    """What is wrong with a file, without its name."""


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The open file; what h5py raises for damage, here or later, is told as a TableFileError."""
    try:
        with open_file(path) as file:
            yield file
    except _Unfit as error:
        raise TableFileError(str(error), file=path) from None
    except TableFileError:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, MemoryError, OverflowError) as error:
        raise TableFileError(f"can't be read as HDF5: {_why(error)}", file=path) from None


def _why(error: Exception) -> str:
    """What is wrong, in words for those who do not know HDF5; what HDF5 says of a damaged file tells them nothing."""
    number = getattr(error, "errno", None)
    if number is not None:
        return os.strerror(number)
    return "it is cut short, or still being written" if "truncated" in str(error) else "it is damaged"


def _error_class(path: str | Path) -> Any:
    """``check_format`` makes its error of one text that begins with the file's name."""

    def make(text: str) -> TableFileError:
        return TableFileError(text.removeprefix(f"{path}: "), file=path)

    return make


def _number(file: Any, name: str) -> int:
    value = file.attrs.get(name)
    if not isinstance(value, int | np.integer) or isinstance(value, bool | np.bool_):
        raise _Unfit(f"the attribute {name} is missing or is no integer")
    return int(value)


def _array(file: Any, name: str, dtype: np.dtype[Any]) -> Any:
    """A list of integers as ``dtype``, once its numbers are 0 or more and fit; None for an absent mirror."""
    item = file.get(name)
    if item is None and name == "mirror":
        return None
    shape = getattr(item, "shape", None)
    if shape is None or len(shape) != 1 or item.dtype.kind not in "iu":
        raise _Unfit(f"/{name} is missing or is no list of integers")
    _check_stored(item, name)
    found = item[:]
    if found.size and (int(found.min()) < 0 or int(found.max()) > int(np.iinfo(dtype).max)):
        at = int(np.argmax((found < 0) | (found > np.iinfo(dtype).max)))
        raise _Unfit(f"/{name} holds {int(found[at])} at {at}: its numbers go from 0 to {np.iinfo(dtype).max}")
    return found.astype(dtype, copy=False)


def _check_stored(item: Any, name: str) -> None:
    """A shape without the bytes for it would be read as zeros, and might not fit the memory."""
    if item.chunks is None and item.id.get_storage_size() != item.size * item.dtype.itemsize and item.dtype.kind != "O":
        raise _Unfit(f"/{name} has a shape of {item.size} and {item.id.get_storage_size()} bytes: it was never written")
    if item.size > 2**31:
        raise _Unfit(f"/{name} has {item.size} entries: a table holds at most {2**31}")


def _extras(file: Any) -> tuple[tuple[int, int, str], ...]:
    group = file.get("extras")
    if group is None:
        return ()
    if not hasattr(group, "keys"):
        raise _Unfit("/extras is no group")
    ranks, rows = _array(group, "rank", np.dtype("<i4")), _array(group, "row", np.dtype("<i8"))
    texts = group.get("text")
    if texts is None or getattr(texts, "shape", None) != ranks.shape or texts.dtype.kind not in "SO":
        raise _Unfit("/extras/text is missing or is no list of as many texts as /extras/rank has numbers")
    if ranks.shape != rows.shape:
        raise _Unfit(f"/extras/rank has {ranks.size} entries and /extras/row {rows.size}")
    return tuple(zip(ranks.tolist(), rows.tolist(), map(str, texts.asstr()[:]), strict=True))


def _checksum(table: StoredTable) -> str:
    """XXH3-64 over p, v, m and lowered as int64, then the datasets in their order, then the extras as text."""
    digest = xxhash.xxh3_64()
    digest.update(np.array([table.p, table.v, table.m, table.lowered], dtype="<i8").tobytes())
    for name, dtype in _DTYPES.items():
        array: Any = getattr(table, name)
        if array is not None:
            digest.update(np.asarray(array, dtype=dtype).tobytes())
    digest.update("".join(f"{rank} {row} {text}\n" for rank, row, text in table.extras).encode())
    return f"xxh3:{digest.hexdigest()}"
