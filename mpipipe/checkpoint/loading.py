"""Finding and loading: the newest complete checkpoint, each rank its own tensors, whatever the ranks were that saved
it.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpipipe.collectives import all_gather_objects, attempt, on_first_rank
from mpipipe.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointIncompleteError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)
from mpipipe.formats import checkpoint as files
from mpipipe.transport import Transport

NAMES_SHOWN = 5

Kind = tuple[tuple[int, ...], str]
"""A tensor's shape and element type, the latter by its name in a checkpoint (docs/formats.md)."""

_GRAVEST_FIRST = (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointError,
    CheckpointCorruptError,
    CheckpointIncompleteError,
)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What one rank asked for. ``tensors``: the names as asked -> arrays of this process alone (names that share a
    tensor share the array); bfloat16 tensors are uint16 holding the bits."""

    folder: Path
    step: int
    scalars: dict[str, int | float | str]
    tensors: dict[str, np.ndarray]
    config_text: str


def load(folder: str | Path, names: Iterable[str], *, verify: bool = True) -> LoadedCheckpoint:
    """The tensors ``names`` (full dataset paths or aliases) of one checkpoint. Opens only the files that hold them. Not
    collective.

    Raises CheckpointMismatchError for a name that is not there, CheckpointNotFoundError, CheckpointIncompleteError and
    CheckpointCorruptError as :func:`mpipipe.formats.checkpoint.read_manifest` and ``read_tensor`` do.
    """
    folder = Path(folder)
    manifest = files.read_manifest(folder)
    wanted = {name: manifest.find(name) for name in names}
    missing = [name for name, entry in wanted.items() if entry is None]
    if missing:
        raise CheckpointMismatchError(f"{folder}: {_list_names('does not hold', missing, _known_names(manifest))}")
    entries = {entry.name: entry for entry in wanted.values() if entry is not None}
    arrays = {entry.name: array for entry, array in files.read_tensors(folder, entries.values(), verify=verify)}
    tensors = {name: arrays[entry.name] for name, entry in wanted.items() if entry is not None}
    return LoadedCheckpoint(folder, manifest.step, dict(manifest.scalars), tensors, manifest.config_text)


def check_names(
    manifest: files.Manifest, expected: Collection[str], kinds: Mapping[str, Kind] | None = None
) -> None:
    """Raise CheckpointMismatchError unless the checkpoint holds exactly the tensors ``expected`` (of all ranks
    together).

    A tensor counts as expected by its own name or an alias. ``kinds``: name -> shape and element type in the model,
    where they are to be compared. The message names missing and unexpected tensors with the nearest names, and both
    shapes or types.
    """
    problems = []
    missing = sorted(name for name in expected if manifest.find(name) is None)
    if missing:
        problems.append(_list_names("the checkpoint lacks", missing, _known_names(manifest)))
    reached = {entry.name for name in expected if (entry := manifest.find(name)) is not None}
    unexpected = sorted(set(manifest.tensors) - reached)
    if unexpected:
        problems.append(_list_names("the checkpoint also holds", unexpected, list(expected)))
    differing = []
    for name, (shape, dtype) in (kinds or {}).items():
        entry = manifest.find(name)
        if entry is not None and entry.shape != tuple(shape):
            differing.append(f"{name} is {entry.shape} in the checkpoint and {tuple(shape)} in the model")
        elif entry is not None and entry.dtype != dtype:
            differing.append(f"{name} is {entry.dtype} in the checkpoint and {dtype} in the model")
    if differing:
        more = f", and {len(differing) - NAMES_SHOWN} more" if len(differing) > NAMES_SHOWN else ""
        problems.append("; ".join(differing[:NAMES_SHOWN]) + more)
    if problems:
        remedy = (
            "Compare [model] with the run file in its 'config'"
            if "[model]" in manifest.config_text.splitlines()
            else "Compare the layers of the script, their order and shapes, with those that saved it; another run.dir "
            "begins anew"
        )
        raise CheckpointMismatchError(
            f"the checkpoint of step {manifest.step} does not fit this model: {'; '.join(problems)}. {remedy}"
        )


def restore(
    transport: Transport,
    checkpoints_dir: str | Path,
    kinds: Mapping[str, Kind],
    *,
    folder: str | Path | None = None,
) -> tuple[LoadedCheckpoint | None, list[str]]:
    """Each rank's tensors (``kinds``: its names -> shape and element type) from the newest checkpoint that is whole for
    all ranks. Collective.

    Returns the loaded state, or None where there is none to be used, and why newer ones were passed over, the same list
    on every rank. Every checksum that a rank reads is compared: when a tensor is damaged for one rank, all ranks go on
    to the next older checkpoint. With ``folder`` only that one is tried, and damage is an error: the same
    CheckpointError on all ranks. Raises CheckpointMismatchError on all ranks when the checkpoint is sound and belongs
    to another model (see :func:`check_names`).
    """
    mine = {name: [list(shape), dtype] for name, (shape, dtype) in kinds.items()}
    everything: dict[str, Kind] = {
        name: (tuple(shape), dtype)
        for reply in all_gather_objects(transport, mine)
        for name, (shape, dtype) in reply.items()
    }
    if folder is not None:
        return _load_on_all(transport, Path(folder), kinds, everything), []
    passed_over: list[str] = []
    # One look at the folder, by one rank: the others may see it later or sooner.
    for name, problem in on_first_rank(transport, lambda: _newest_first(checkpoints_dir)):
        if problem:
            passed_over.append(problem)
            continue
        try:
            return _load_on_all(transport, Path(checkpoints_dir) / name, kinds, everything), passed_over
        except (CheckpointIncompleteError, CheckpointCorruptError) as error:
            passed_over.append(str(error))
    return None, passed_over


def _newest_first(checkpoints_dir: str | Path) -> list[tuple[str, str | None]]:
    """(folder name, why it does not count) of every checkpoint."""
    try:
        listings = files.list_checkpoints(checkpoints_dir)
    except OSError as error:
        raise CheckpointError(f"{checkpoints_dir}: the checkpoints can't be listed: {error}") from error
    return [(listing.path.name, listing.problem) for listing in reversed(listings)]


def _load_on_all(
    transport: Transport, folder: Path, kinds: Mapping[str, Kind], everything: Mapping[str, Kind]
) -> LoadedCheckpoint:
    """``load`` on every rank; when it fails on one, the same error of the same class on all (the gravest, of the lowest
    rank).
    """

    def read() -> LoadedCheckpoint:
        try:
            check_names(files.read_manifest(folder), everything, everything)
            return load(folder, kinds)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointIncompleteError(str(error)) from error

    loaded, faults = attempt(transport, read)
    if not faults:
        assert loaded is not None
        return loaded
    ranked = [fault for kind in _GRAVEST_FIRST for fault in faults if type(fault.error) is kind]
    gravest = (ranked or faults)[0]
    failure = type(gravest.error)(f"rank {gravest.rank}: {gravest.error}")
    failure.seen_alike = True
    raise failure


def _known_names(manifest: files.Manifest) -> list[str]:
    return [*manifest.tensors, *manifest.aliases]


def _list_names(what: str, names: list[str], known: Collection[str]) -> str:
    """``what`` and the first few names, each with the nearest known one."""
    shown = []
    for name in names[:NAMES_SHOWN]:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        shown.append(f"{name} (nearest: {near[0]})" if near else name)
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{what} {', '.join(shown)}{more}"
