"""The manifest of a checkpoint: the JSON file that is written last and says what the checkpoint is made of.

A folder without a manifest that passes :func:`read_manifest` is not a checkpoint. ``docs/formats.md`` describes every
field.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from mpipipe.errors import CheckpointCorruptError, CheckpointError, CheckpointIncompleteError, CheckpointNotFoundError
from mpipipe.formats.checkpoint_shard import TensorEntry, check_tensor_name, numpy_type

MANIFEST_FORMAT = "mpipipe-checkpoint"
MANIFEST_VERSION = 1
MANIFEST_NAME = "manifest.json"

Scalar = int | float | str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    ``files``: file name -> size in bytes. ``tensors``: full dataset path -> where it lies. ``aliases``: other name ->
    the name that is stored. ``scalars``: the position in the data, seeds, the loss scale and the like. ``config_text``:
    the resolved run file.
    """

    step: int
    files: dict[str, int]
    tensors: dict[str, TensorEntry]
    aliases: dict[str, str]
    scalars: dict[str, Scalar]
    config_text: str

    def find(self, name: str) -> TensorEntry | None:
        """The entry of a tensor, by its own name or an alias; None if there is none."""
        return self.tensors.get(self.aliases.get(name, name))


def make_manifest(
    step: int,
    files: Mapping[str, int],
    entries: Iterable[TensorEntry],
    aliases: Mapping[str, Iterable[str]],
    scalars: Mapping[str, Scalar],
    config_text: str,
) -> Manifest:
    """A manifest from its parts, checked; ``aliases`` as stored name -> the other names that share the tensor.

    Raises CheckpointError for a tensor given twice, an alias of nothing or of two tensors, and a scalar that can't be
    kept.
    """
    tensors: dict[str, TensorEntry] = {}
    for entry in entries:
        check_tensor_name(entry.name)
        if entry.name in tensors:
            raise CheckpointError(
                f"{entry.name} is given twice, in {tensors[entry.name].file} and in {entry.file}; a tensor has one "
                "owner"
            )
        tensors[entry.name] = entry
    owners: dict[str, str] = {}
    for name, others in aliases.items():
        for other in others:
            check_tensor_name(other)
            if name not in tensors:
                raise CheckpointError(f"alias {other} stands for {name}, which is not among the tensors")
            if other in tensors or owners.get(other, name) != name:
                raise CheckpointError(
                    f"alias {other} of {name} is also a tensor of its own or an alias of {owners.get(other, other)}"
                )
            owners[other] = name
    values = {key: plain_scalar(key, value) for key, value in scalars.items()}
    return Manifest(step, dict(files), dict(sorted(tensors.items())), dict(sorted(owners.items())), values, config_text)


def write_manifest(folder: str | Path, manifest: Manifest) -> Path:
    """Write ``manifest.json`` into ``folder`` and to the disk itself. Raises OSError; FileExistsError if there is
    one.
    """
    fields: dict[str, Any] = {
        "format": MANIFEST_FORMAT,
        "version": MANIFEST_VERSION,
        "step": manifest.step,
        "scalars": {key: _encode(value) for key, value in manifest.scalars.items()},
        "files": [{"name": name, "nbytes": nbytes} for name, nbytes in sorted(manifest.files.items())],
        "tensors": [asdict(entry) for entry in manifest.tensors.values()],
        "aliases": manifest.aliases,
        "config": manifest.config_text,
    }
    fields["checksum"] = _own_checksum(fields)
    path = Path(folder) / MANIFEST_NAME
    with open(path, "x", encoding="utf-8") as stream:
        json.dump(fields, stream, indent=1, allow_nan=False)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    return path


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of ``folder``, every field checked, and every file found with the size that it gives.

    Raises CheckpointNotFoundError when there is no such folder, CheckpointIncompleteError for no manifest or a file
    that is missing or has another size, CheckpointCorruptError for a manifest that is not what was written,
    CheckpointError for a newer version. The bytes of the tensors are not read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointNotFoundError(
            f"{folder}: no such folder; `mpipipe checkpoint list RUN_DIR` shows the checkpoints of a run"
        )
    path = folder / MANIFEST_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointIncompleteError(f"{folder}: there is no {MANIFEST_NAME}: the save did not end") from None
    except UnicodeDecodeError as error:
        raise CheckpointCorruptError(f"{path}: not UTF-8: {error}") from None
    manifest = _Parser(path).manifest(text)
    for name, nbytes in manifest.files.items():
        _check_size(folder / name, nbytes)
    return manifest


def _check_size(path: Path, nbytes: int) -> None:
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise CheckpointIncompleteError(
            f"{path}: the file is missing; the manifest lists it with {nbytes} bytes"
        ) from None
    if found != nbytes:
        raise CheckpointIncompleteError(f"{path}: the file has {found} bytes; the manifest says {nbytes}")


class _Parser:
    """Checks one manifest field by field; every error names the file and the field."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def manifest(self, text: str) -> Manifest:
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise self.corrupt(f"not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise self.corrupt("not a JSON object")
        self.check_version(fields)
        if fields.get("checksum") != _own_checksum(fields):
            raise self.corrupt(
                f"its own checksum {fields.get('checksum')!r} does not agree with its content, "
                f"{_own_checksum(fields)!r}"
            )
        files = self.files(self.get(fields, "files", list))
        entries = [self.entry(item, files) for item in self.get(fields, "tensors", list)]
        scalars = {key: self.scalar(key, value) for key, value in self.get(fields, "scalars", dict).items()}
        aliases: dict[str, list[str]] = {}
        for other, name in self.get(fields, "aliases", dict).items():
            aliases.setdefault(str(name), []).append(other)
        step, config_text = self.count(fields, "step"), self.get(fields, "config", str)
        try:
            return make_manifest(step, files, entries, aliases, scalars, config_text)
        except CheckpointError as error:
            raise self.corrupt(str(error)) from None

    def check_version(self, fields: dict[str, Any]) -> None:
        if fields.get("format") != MANIFEST_FORMAT:
            raise self.corrupt(
                f"format {fields.get('format')!r} found, {MANIFEST_FORMAT!r} version 1 to {MANIFEST_VERSION} supported"
            )
        version = self.count(fields, "version")
        if not 1 <= version <= MANIFEST_VERSION:
            raise CheckpointError(
                f"{self.path}: version {version} found, 1 to {MANIFEST_VERSION} supported; a newer mpipipe wrote this "
                "checkpoint"
            )

    def files(self, items: list[Any]) -> dict[str, int]:
        files: dict[str, int] = {}
        for item in items:
            name = self.get(item, "name", str)
            if not name or "/" in name or "\0" in name or name in (".", "..") or name in files:
                raise self.corrupt(f"files: {name!r} is no plain file name or is listed twice")
            files[name] = self.count(item, "nbytes")
        return files

    def entry(self, item: Any, files: dict[str, int]) -> TensorEntry:
        name = self.get(item, "name", str)
        shape = tuple(self.get(item, "shape", list))
        if not all(type(extent) is int and extent >= 0 for extent in shape):
            raise self.corrupt(f"tensors: {name}: shape {shape} is not a list of sizes")
        file, dtype, checksum = (self.get(item, key, str) for key in ("file", "dtype", "checksum"))
        offset, nbytes = self.count(item, "offset"), self.count(item, "nbytes")
        kind = numpy_type(dtype)
        if kind is None or nbytes != math.prod(shape) * kind.itemsize:
            raise self.corrupt(f"tensors: {name}: dtype {dtype!r} and shape {shape} do not make {nbytes} bytes")
        if offset + nbytes > files.get(file, -1):
            raise self.corrupt(
                f"tensors: {name}: bytes {offset} to {offset + nbytes} are not in a listed file ({file!r})"
            )
        return TensorEntry(name, file, shape, dtype, offset, nbytes, checksum)

    def scalar(self, key: str, value: Any) -> Scalar:
        if isinstance(value, dict) and value.get("float") in ("nan", "inf", "-inf"):
            return float(value["float"])
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise self.corrupt(f"scalars: {key}: {value!r} is neither a number nor text")
        return value

    def count(self, fields: Any, key: str) -> int:
        value = self.get(fields, key, int)
        if isinstance(value, bool) or value < 0:
            raise self.corrupt(f"{key}: {value!r} is not a count")
        return int(value)

    def get(self, fields: Any, key: str, kind: type) -> Any:
        if not isinstance(fields, dict) or not isinstance(fields.get(key), kind):
            found = fields.get(key) if isinstance(fields, dict) else fields
            raise self.corrupt(f"field {key!r}: {kind.__name__} expected, {found!r} found")
        return fields[key]

    def corrupt(self, problem: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(f"{self.path}: {problem}")


def _own_checksum(fields: Mapping[str, Any]) -> str:
    """XXH3-64 over the other fields as JSON with sorted keys, no spaces, and all but ASCII escaped."""
    rest = {key: value for key, value in fields.items() if key != "checksum"}
    return f"xxh3:{xxhash.xxh3_64_hexdigest(json.dumps(rest, sort_keys=True, separators=(',', ':')).encode())}"


def _encode(value: Scalar) -> Any:
    """JSON has no words for infinity and not-a-number: they are kept as {"float": "inf"}."""
    return {"float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def plain_scalar(key: str, value: Any) -> Scalar:
    """``value`` (also a bool or a numpy scalar) as an int, a float or text. Raises CheckpointError if it is none, or
    over 64 bits.
    """
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, bool):
        plain = int(plain)
    if not isinstance(plain, int | float | str) or "/" in key or key in ("", ".", ".."):
        raise CheckpointError(
            f"scalar {key!r}: {value!r} can't be kept; give an int, a float or text under a name without '/'"
        )
    if isinstance(plain, int) and not -(2**63) <= plain < 2**64:
        raise CheckpointError(f"scalar {key!r}: {plain} does not fit into 64 bits")
    return plain
