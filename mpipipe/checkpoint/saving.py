"""Saving: the ranks write side by side, the first rank commits, and every rank knows how it went.

1. All ranks tell how many bytes they bring; the first rank looks for space and makes ``step-00000100.part-<id>``.
2. Each rank with tensors writes its shard there, to the disk itself.
3. The first rank writes ``checkpoint.h5``, then ``manifest.json``, flushes the folder, renames it, flushes its parent.

After each part the ranks exchange what went wrong. A trouble on one rank is the same CheckpointError on all of them,
and the ``.part`` folder is removed. A launch that is killed leaves its ``.part`` folder, which no reader takes for a
checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mpipipe.collectives import all_gather_objects, attempt
from mpipipe.errors import CheckpointError
from mpipipe.formats import checkpoint as files
from mpipipe.formats.paths import RunPaths, damaged_name
from mpipipe.formats.whole import sync
from mpipipe.transport import Transport

log = logging.getLogger(__name__)

VISIBLE_WITHIN_S = 60.0
"""How long a rank waits to see what another node has just made. Network file systems may answer from a cache for that
long.
"""


@dataclass(frozen=True)
class CheckpointState:
    """What one rank brings to a save.

    ``tensors``: full dataset path -> array, only those that this rank owns (each tensor has one owner among the ranks).
    ``scalars``: step counters, data position, seeds; a name given by several ranks must have the same value on all.
    ``aliases``: owned name -> the other names that share the tensor (tied weights). ``config_text``: the resolved run
    file, the same on all ranks. ``bfloat16``: names whose arrays are uint16 holding bfloat16 bits.
    """

    tensors: dict[str, np.ndarray]
    scalars: dict[str, int | float | str]
    aliases: dict[str, tuple[str, ...]]
    config_text: str
    bfloat16: frozenset[str] = field(default=frozenset())


def save(transport: Transport, checkpoints_dir: str | Path, step: int, state: CheckpointState) -> Path:
    """Save a checkpoint of ``step``; the folder ``checkpoints_dir/step-...`` once it is complete. Collective.

    A complete checkpoint of that step is kept: with the same tensors and scalars there is nothing to do, with others
    the save is refused. A damaged one is moved aside to ``step-....damaged-<id>``. Raises the same CheckpointError on
    every rank, naming the rank and the cause. The arrays may change again as soon as this returns.
    """
    return _Save(transport, Path(checkpoints_dir), step, state).run()


class _Save:
    def __init__(self, transport: Transport, checkpoints_dir: Path, step: int, state: CheckpointState) -> None:
        self.transport = transport
        self.parent = checkpoints_dir
        self.step = step
        self.state = state
        self.target = checkpoints_dir / RunPaths(Path()).checkpoint(step).name
        self.part: Path | None = None
        self.damage: str | None = None
        self.scalars: dict[str, int | float | str] = {}

    def run(self) -> Path:
        announced = self.all_ranks(self.announce)
        plan = self.first_rank(lambda: self.prepare(announced))
        if plan["exists"]:
            return self.keep_existing()
        self.part = self.parent / plan["part"]
        written = self.all_ranks(self.write_own_shard)
        self.first_rank(lambda: self.commit(written))
        return self.target

    def all_ranks(self, action: Callable[[], Any]) -> list[Any]:
        """Every rank's result of ``action``, in rank order; the same CheckpointError on all ranks when it failed on
        one.
        """
        result, faults = attempt(self.transport, action)
        if faults:
            self.discard()
            troubles = "; ".join(f"rank {fault.rank}: {fault.error}" for fault in faults[:3])
            more = f" (and {len(faults) - 3} ranks more)" if len(faults) > 3 else ""
            failure = CheckpointError(f"the checkpoint of step {self.step} was not saved: {troubles}{more}")
            failure.seen_alike = True
            raise failure
        return all_gather_objects(self.transport, result)

    def first_rank(self, action: Callable[[], Any]) -> Any:
        return self.all_ranks(action if self.transport.rank == 0 else lambda: None)[0]

    def discard(self) -> None:
        """Remove the unfinished folder; no rank goes on before it is gone."""
        if self.part is not None and self.transport.rank == 0:
            shutil.rmtree(self.part, ignore_errors=True)
        all_gather_objects(self.transport, None)

    def announce(self) -> dict[str, Any]:
        if self.step < 0:
            raise CheckpointError(f"step {self.step} can't be saved; steps count from 0")
        scalars = {key: json.dumps(files.plain_scalar(key, value)) for key, value in self.state.scalars.items()}
        return {
            "nbytes": files.bytes_needed(self.state.tensors),
            "step": self.step,
            "scalars": scalars,
            "config": self.state.config_text,
        }

    def prepare(self, announced: list[dict[str, Any]]) -> dict[str, Any]:
        """The first rank's part before the writing: checks, and the new folder."""
        self.scalars = _agreed_scalars(announced)
        self.parent.mkdir(parents=True, exist_ok=True)
        if self.target.exists():
            self.damage = self.problem_of_target()
            if self.damage is None:
                return {"exists": True}
        files.check_free_space(self.parent, sum(reply["nbytes"] for reply in announced))
        self.part = self.parent / RunPaths(Path()).checkpoint_part(self.step, secrets.token_hex(4)).name
        self.part.mkdir()
        return {"exists": False, "part": self.part.name}

    def write_own_shard(self) -> dict[str, Any] | None:
        """This rank's shard: its file name, size and entries; None without tensors."""
        aliases = {name: list(others) for name, others in self.state.aliases.items()}
        if not self.state.tensors:
            return {"file": None, "nbytes": 0, "entries": [], "aliases": aliases}
        part = self.part
        assert part is not None
        _wait_until(
            part.is_dir,
            f"{part}: made by rank 0, and not to be seen from this rank's node; is run.dir on a disk that all nodes "
            "share?",
        )
        path = part / files.shard_name(self.transport.rank)
        entries = files.write_shard(
            path,
            self.state.tensors,
            bfloat16=self.state.bfloat16,
            attributes={"step": self.step, "written_by_rank": self.transport.rank},
            config_text=self.state.config_text,
        )
        sync(part)
        return {
            "file": path.name,
            "nbytes": path.stat().st_size,
            "entries": [asdict(entry) for entry in entries],
            "aliases": aliases,
        }

    def commit(self, written: list[dict[str, Any]]) -> None:
        """The first rank's part after the writing: master file, manifest, rename."""
        part = self.part
        assert part is not None
        entries = [
            files.TensorEntry(**{**fields, "shape": tuple(fields["shape"])})
            for reply in written
            for fields in reply["entries"]
        ]
        aliases: dict[str, list[str]] = {}
        for reply in written:
            for name, others in reply["aliases"].items():
                aliases.setdefault(name, []).extend(others)
        manifest = files.make_manifest(self.step, {}, entries, aliases, self.scalars, self.state.config_text)
        master = files.write_master(part, manifest)
        sizes = {
            master.name: master.stat().st_size,
            **{reply["file"]: reply["nbytes"] for reply in written if reply["file"]},
        }
        files.write_manifest(part, replace(manifest, files=sizes))
        _wait_until(lambda: _is_whole(part), f"{part}: rank 0 does not see the files as the other ranks wrote them")
        sync(part)
        if self.target.exists():
            if self.damage is None:
                raise CheckpointError(f"{self.target} appeared meanwhile: does another launch write to this folder?")
            aside = damaged_name(self.target, secrets.token_hex(4))
            log.warning("%s; it was moved aside to %s", self.damage, aside.name)
            os.rename(self.target, aside)
        os.rename(part, self.target)
        sync(self.parent)

    def problem_of_target(self) -> str | None:
        """What is wrong with the checkpoint of this step that is there already; every byte of it is read."""
        listings = files.list_checkpoints(self.parent)
        problem = next(listing.problem for listing in listings if listing.path == self.target)
        return problem or next(files.find_problems(self.target), None)

    def keep_existing(self) -> Path:
        """Return the complete checkpoint that is already there if it holds what was to be saved; refuse to replace it
        if not.
        """
        counts = self.all_ranks(self.count_equal)
        self.first_rank(lambda: self.check_existing(counts))
        return self.target

    def count_equal(self) -> int:
        """How many of this rank's tensors the existing checkpoint has with the same bytes; -1 if it lacks one of
        them.
        """
        manifest = files.read_manifest(self.target)
        found = {name: manifest.tensors.get(name) for name in self.state.tensors}
        equal = [
            entry is not None and entry.checksum == files.checksum_of(self.state.tensors[name])
            for name, entry in found.items()
        ]
        return len(equal) if all(equal) else -1

    def check_existing(self, counts: list[int]) -> None:
        manifest = files.read_manifest(self.target)
        same_scalars = json.dumps(manifest.scalars, sort_keys=True) == json.dumps(self.scalars, sort_keys=True)
        if min(counts) < 0 or sum(counts) != len(manifest.tensors) or not same_scalars:
            raise CheckpointError(
                f"{self.target} is there already, complete, and holds another state than the one to be saved; it is "
                "kept. "
                "Move it away, or set run.dir to another folder"
            )


def _agreed_scalars(announced: list[dict[str, Any]]) -> dict[str, int | float | str]:
    """The union of all ranks' scalars. Raises CheckpointError where two ranks disagree in one, in the step or in the
    run file.
    """
    first: dict[str, tuple[int, str]] = {}
    for rank, reply in enumerate(announced):
        for key in ("step", "config"):
            if reply[key] != announced[0][key]:
                raise CheckpointError(f"rank {rank} and rank 0 do not save the same: the {key} differs")
        for key, text in reply["scalars"].items():
            owner, known = first.setdefault(key, (rank, text))
            if text != known:
                raise CheckpointError(f"scalar {key!r} is {known} on rank {owner} and {text} on rank {rank}")
    return {key: json.loads(text) for key, (_, text) in first.items()}


def _is_whole(folder: Path) -> bool:
    try:
        files.read_manifest(folder)
    except CheckpointError:
        return False
    return True


def _wait_until(condition: Callable[[], bool], trouble: str) -> None:
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while not condition():
        if time.monotonic() > deadline:
            raise CheckpointError(f"{trouble} (waited {VISIBLE_WITHIN_S:g} s)")
        time.sleep(0.05)
