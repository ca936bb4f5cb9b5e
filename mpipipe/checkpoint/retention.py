"""Which checkpoints stay: the newest few, and every so many steps for good."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from mpipipe.formats import checkpoint as files
from mpipipe.formats.paths import is_trash, trash_name, unfinished_step_of
from mpipipe.formats.whole import sync

log = logging.getLogger(__name__)

STALE_AFTER_S = 3600.0
"""An unfinished save is taken for dead when nothing in its folder has changed for this long."""


@dataclass(frozen=True)
class Pruned:
    """What a call removed, and ``problem``: why it removed nothing, None if all went well."""

    removed: tuple[Path, ...]
    problem: str | None


def prune(
    checkpoints_dir: str | Path,
    keep_last: int,
    keep_every: int = 0,
    *,
    read_newest: bool = True,
    newest_step: int | None = None,
) -> Pruned:
    """Remove complete checkpoints except the newest ``keep_last`` and those whose step is a multiple of ``keep_every``.

    ``keep_last = 0`` keeps all of them; ``keep_every = 0`` keeps none beyond the newest. ``newest_step``: the step just
    saved; later ones, which a resume may have passed over as damaged, neither count nor go. For one rank alone, after a
    save has returned.

    Nothing is removed before the newest complete checkpoint is verified: by reading all of it, or with
    ``read_newest=False`` by its manifest and the sizes of its files. Damaged checkpoints are never removed here. A
    folder is renamed to ``.trash-...`` first, so a kill in the midst leaves no half checkpoint under a checkpoint's
    name; what such a kill left is removed by the next call, as are unfinished saves older than the newest checkpoint in
    which nothing has changed for an hour. Raises OSError.
    """
    folder = Path(checkpoints_dir)
    listings = files.list_checkpoints(folder)
    last = newest_step if newest_step is not None else max((listing.step for listing in listings), default=0)
    whole = [listing for listing in listings if listing.problem is None and listing.step <= last]
    if not whole:
        return Pruned((), None)
    newest = whole[-1]
    if read_newest and (problem := next(files.find_problems(newest.path), None)) is not None:
        log.warning("no checkpoint is removed: the newest one is damaged: %s", problem)
        return Pruned((), problem)
    for path in folder.iterdir():
        if is_trash(path):
            shutil.rmtree(path)
    surplus = whole[:-keep_last] if keep_last > 0 else []
    doomed = [listing.path for listing in surplus if not (keep_every > 0 and listing.step % keep_every == 0)]
    doomed += [
        listing.path
        for listing in listings
        if unfinished_step_of(listing.path) is not None and listing.step <= newest.step and _is_stale(listing.path)
    ]
    for path in doomed:
        _remove(path)
    return Pruned(tuple(doomed), None)


def _remove(path: Path) -> None:
    trash = trash_name(path, secrets.token_hex(4))
    os.rename(path, trash)
    sync(path.parent)
    shutil.rmtree(trash)


def _is_stale(folder: Path) -> bool:
    try:
        times = [folder.stat().st_mtime, *(path.stat().st_mtime for path in folder.iterdir())]
    except FileNotFoundError:
        return False  # it was committed or removed while we looked
    return time.time() - max(times) > STALE_AFTER_S
