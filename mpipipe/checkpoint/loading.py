"""Finding and loading: the newest complete checkpoint, each rank its own tensors, whatever the ranks were that saved
it.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpipipe.collectives import all_gather_objects
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


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What one rank asked for. ``tensors``: the names as asked -> arrays of this process alone (names that share a
    tensor share the array); bfloat16 tensors are uint16 holding the bits."""

    folder: Path
    step: int
    scalars: dict[str, int | float | str]
    tensors: dict[str, np.ndarray]
    config_text: str


def find_latest(checkpoints_dir: str | Path, *, verify: bool = False) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint, or None, and a reason for each newer one that was passed over, newest first.

    With ``verify`` also every tensor is read and compared with its checksum. Unfinished saves older than the one found
    are not listed.
    """
    skipped: list[str] = []
    for listing in reversed(files.list_checkpoints(checkpoints_dir)):
        problem = listing.problem
        if problem is None and verify:
            problem = next(files.find_problems(listing.path), None)
        if problem is None:
            return listing.path, skipped
        skipped.append(problem)
    return None, skipped


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
    manifest: files.Manifest, expected: Collection[str], shapes: Mapping[str, tuple[int, ...]] | None = None
) -> None:
    """Raise CheckpointMismatchError unless the checkpoint holds exactly the tensors ``expected`` (of all ranks
    together).

    A tensor counts as expected by its own name or an alias. ``shapes``: name -> the shape that the model has, where it
    is to be compared. The message names missing and unexpected tensors with the nearest names, and both shapes.
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
    for name, shape in (shapes or {}).items():
        entry = manifest.find(name)
        if entry is not None and entry.shape != tuple(shape):
            differing.append(f"{name} is {entry.shape} in the checkpoint and {tuple(shape)} in the model")
    if differing:
        more = f", and {len(differing) - NAMES_SHOWN} more" if len(differing) > NAMES_SHOWN else ""
        problems.append("; ".join(differing[:NAMES_SHOWN]) + more)
    if problems:
        raise CheckpointMismatchError(
            f"the checkpoint of step {manifest.step} does not fit this model: {'; '.join(problems)}. Compare [model] "
            "with the run file in its 'config'"
        )


def restore(
    transport: Transport,
    checkpoints_dir: str | Path,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    folder: str | Path | None = None,
) -> tuple[LoadedCheckpoint | None, list[str]]:
    """Each rank's tensors (``shapes``: its names -> its shapes) from the newest checkpoint that is whole for all ranks.
    Collective.

    Returns the loaded state, or None where there is none to be used, and why newer ones were passed over, the same list
    on every rank. Every checksum that a rank reads is compared: when a tensor is damaged for one rank, all ranks go on
    to the next older checkpoint. With ``folder`` only that one is tried, and damage is an error: the same
    CheckpointError on all ranks. Raises CheckpointMismatchError on all ranks when the checkpoint is sound and belongs
    to another model (see :func:`check_names`).
    """
    # One look at the folder, by one rank: the others may see it later or sooner.
    found: list[tuple[str, str | None]] = []
    trouble = None
    if folder is None and transport.rank == 0:
        try:
            listings = files.list_checkpoints(checkpoints_dir)
            found = [(listing.path.name, listing.problem) for listing in reversed(listings)]
        except OSError as error:
            trouble = f"{checkpoints_dir}: the checkpoints can't be listed: {error}"
    mine = {name: list(shape) for name, shape in shapes.items()}
    replies = all_gather_objects(transport, {"found": found, "trouble": trouble, "shapes": mine})
    if replies[0]["trouble"]:
        failure = CheckpointError(replies[0]["trouble"])
        failure.seen_alike = True
        raise failure
    everything = {name: tuple(shape) for reply in replies for name, shape in reply["shapes"].items()}
    if folder is not None:
        return _load_on_all(transport, Path(folder), shapes, everything), []
    passed_over: list[str] = []
    for name, problem in replies[0]["found"]:
        if problem:
            passed_over.append(problem)
            continue
        try:
            return _load_on_all(transport, Path(checkpoints_dir) / name, shapes, everything), passed_over
        except (CheckpointIncompleteError, CheckpointCorruptError) as error:
            passed_over.append(str(error))
    return None, passed_over


def _load_on_all(
    transport: Transport, folder: Path, shapes: Mapping[str, tuple[int, ...]], everything: Mapping[str, tuple[int, ...]]
) -> LoadedCheckpoint:
    """``load`` on every rank; when it fails on one, the same error of the same class on all (the gravest, of the lowest
    rank).
    """
    loaded, trouble = None, None
    try:
        check_names(files.read_manifest(folder), everything, everything)
        loaded = load(folder, shapes)
    except (CheckpointError, OSError) as error:
        kind = type(error) if isinstance(error, CheckpointError) else CheckpointIncompleteError
        trouble = [kind.__name__, str(error)]
    troubles = [(rank, reply) for rank, reply in enumerate(all_gather_objects(transport, trouble)) if reply is not None]
    if not troubles:
        assert loaded is not None
        return loaded
    kinds = (
        CheckpointMismatchError,
        CheckpointNotFoundError,
        CheckpointError,
        CheckpointCorruptError,
        CheckpointIncompleteError,
    )
    order = [kind.__name__ for kind in kinds]
    rank, (name, text) = min(troubles, key=lambda item: (order.index(item[1][0]), item[0]))
    failure = kinds[order.index(name)](f"rank {rank}: {text}")
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
