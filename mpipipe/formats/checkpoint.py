"""A checkpoint folder as a whole: the file that people open, the manifest and the shards.

::

    step-00000100/checkpoint.h5    external links to every tensor by name, step, scalars, config
                  shard-0000.h5    written by the ranks, side by side
                  manifest.json    written last; without it the folder is no checkpoint

The parts are in :mod:`mpipipe.formats.checkpoint_shard` and :mod:`mpipipe.formats.checkpoint_manifest`; their names are
repeated here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from mpipipe.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from mpipipe.formats import hdf5
from mpipipe.formats.checkpoint_manifest import (
    MANIFEST_FORMAT,
    MANIFEST_NAME,
    MANIFEST_VERSION,
    Manifest,
    Scalar,
    make_manifest,
    plain_scalar,
    read_manifest,
    write_manifest,
)
from mpipipe.formats.checkpoint_shard import (
    BFLOAT16,
    SLICE_BYTES,
    TensorEntry,
    bytes_needed,
    check_free_space,
    checksum_of,
    read_tensor,
    read_tensors,
    shard_problems,
    write_shard,
)
from mpipipe.formats.paths import step_of, unfinished_step_of
from mpipipe.formats.whole import sync

__all__ = [
    "BFLOAT16",
    "BUFFERS",
    "FIRST_MOMENTS",
    "MANIFEST_NAME",
    "MASTER_NAME",
    "PARAMETERS",
    "SECOND_MOMENTS",
    "SLICE_BYTES",
    "CheckpointListing",
    "Manifest",
    "Scalar",
    "TensorEntry",
    "bytes_needed",
    "check_free_space",
    "checksum_of",
    "find_checkpoint",
    "find_latest",
    "find_problems",
    "list_checkpoints",
    "make_manifest",
    "plain_scalar",
    "read_manifest",
    "read_tensor",
    "read_tensors",
    "shard_name",
    "write_manifest",
    "write_master",
    "write_shard",
]

MASTER_NAME = "checkpoint.h5"
PARAMETERS = "/parameters/"
BUFFERS = "/buffers/"
FIRST_MOMENTS = "/optimizer/exp_avg/"
SECOND_MOMENTS = "/optimizer/exp_avg_sq/"
"""A tensor's name in a checkpoint is one of these and its name in the model."""


class CheckpointListing(NamedTuple):
    """One folder among a run's checkpoints. ``problem`` is None for one that can be used, else why it is passed
    over.
    """

    step: int
    path: Path
    problem: str | None


def shard_name(rank: int) -> str:
    """The shard that a rank writes. The number says who wrote it and nothing else: a reader takes names from the
    manifest.
    """
    return f"shard-{rank:04d}.h5"


def write_master(folder: str | Path, manifest: Manifest) -> Path:
    """Write ``checkpoint.h5`` into ``folder``, and to the disk itself: a relative external link for every tensor and
    alias, attributes ``format``, ``version``, ``step``, a dataset ``/scalars/NAME`` for each scalar, and the run file
    as ``/config``.

    Raises OSError from the file system, CheckpointError for names that can't stand side by side.
    """
    path = Path(folder) / MASTER_NAME
    with hdf5.open_file(path, "x") as file:
        hdf5.write_format(file, MANIFEST_FORMAT, MANIFEST_VERSION)
        file.attrs["step"] = np.int64(manifest.step)
        hdf5.write_text(file, "config", manifest.config_text)
        scalars = file.create_group("scalars")
        for key, value in manifest.scalars.items():
            if isinstance(value, str):
                hdf5.write_text(scalars, key, value)
            else:
                scalars.create_dataset(key, data=value, dtype=_scalar_type(value))
        links = {**{name: name for name in manifest.tensors}, **manifest.aliases}
        for name, stored in links.items():
            try:
                file[name] = h5py.ExternalLink(manifest.tensors[stored].file, stored)
            except (ValueError, RuntimeError, OSError) as error:
                raise CheckpointError(f"tensor name {name!r} can't stand beside the other names: {error}") from None
    sync(path, os.O_RDWR)
    return path


def list_checkpoints(folder: str | Path) -> list[CheckpointListing]:
    """Every checkpoint in a run's ``checkpoints/``, by step, and every unfinished one with the reason why it does not
    count.

    Manifests are read and sizes compared; tensors are not read. Empty when the folder is not there. Names that are not
    ours are ignored.
    """
    folder = Path(folder)
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        part, whole = unfinished_step_of(path), step_of(path)
        if part is not None:
            found.append(CheckpointListing(part, path, f"{path}: a save that did not end, or has not yet"))
        elif whole is not None:
            found.append(CheckpointListing(whole, path, _folder_problem(path, whole)))
    return sorted(found, key=lambda listing: (listing.step, listing.path.name))


def find_latest(folder: str | Path, *, verify: bool = False) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint in a run's ``checkpoints/``, or None, and a reason for each newer one that was
    passed over, newest first.

    With ``verify`` also every tensor is read and compared with its checksum. Unfinished saves older than the one found
    are not listed.
    """
    skipped: list[str] = []
    for listing in reversed(list_checkpoints(folder)):
        problem = listing.problem
        if problem is None and verify:
            problem = next(find_problems(listing.path), None)
        if problem is None:
            return listing.path, skipped
        skipped.append(problem)
    return None, skipped


def find_checkpoint(folder: str | Path, step: int | None = None) -> Path:
    """The complete checkpoint of ``step`` in a run's ``checkpoints/``, or the newest one.

    Raises CheckpointNotFoundError, which lists the steps that can be used, and says why others can't.
    """
    listed = list_checkpoints(folder)
    wanted = [entry for entry in listed if step in (None, entry.step)]
    usable = [entry for entry in wanted if entry.problem is None]
    if usable:
        return usable[-1].path
    steps = ", ".join(str(entry.step) for entry in listed if entry.problem is None) or "none"
    what = "usable checkpoint" if step is None else f"usable checkpoint of step {step}"
    reasons = "; ".join(entry.problem for entry in wanted if entry.problem)
    raise CheckpointNotFoundError(
        f"{folder}: there is no {what} (usable steps: {steps})" + (f"; {reasons}" if reasons else "")
    )


def find_problems(folder: str | Path) -> Iterator[str]:
    """Everything that is wrong with a checkpoint, a line each, found by reading all of it; nothing for a sound one.

    Looks at the manifest, each tensor's checksum, each shard's datasets against the manifest and each link of
    ``checkpoint.h5``.
    """
    folder = Path(folder)
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        yield str(error)
        return
    for file in sorted({entry.file for entry in manifest.tensors.values()}):
        yield from shard_problems(folder / file, [entry for entry in manifest.tensors.values() if entry.file == file])
    for entry in manifest.tensors.values():
        try:
            read_tensor(folder, entry)
        except (CheckpointError, OSError) as error:
            yield str(error)
    yield from _master_problems(folder / MASTER_NAME, manifest)


def _scalar_type(value: int | float) -> str:
    if isinstance(value, float):
        return "<f8"
    return "<i8" if value < 2**63 else "<u8"


def _folder_problem(path: Path, step: int) -> str | None:
    try:
        manifest = read_manifest(path)
    except (CheckpointError, OSError) as error:
        return str(error)
    if manifest.step != step:
        return f"{path}: the manifest is that of step {manifest.step}"
    return None


def _master_problems(path: Path, manifest: Manifest) -> Iterator[str]:
    try:
        with hdf5.open_file(path) as file:
            hdf5.check_format(file, MANIFEST_FORMAT, MANIFEST_VERSION, CheckpointCorruptError)
            for name in (*manifest.tensors, *manifest.aliases):
                entry = manifest.find(name)
                link = file.get(name, getlink=True)
                if (
                    entry is None
                    or not isinstance(link, h5py.ExternalLink)
                    or (link.filename, link.path) != (entry.file, entry.name)
                ):
                    yield f"{path}: {name} is not the link to its tensor"
            if int(file.attrs["step"]) != manifest.step or hdf5.read_text(file, "config") != manifest.config_text:
                yield f"{path}: step or config differ from the manifest"
    except (OSError, RuntimeError, KeyError, TypeError, CheckpointCorruptError) as error:
        yield f"{path}: not readable as HDF5: {error}"
