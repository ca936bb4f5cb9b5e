"""Every file name of a run folder, in one place.

::

    RUN_DIR/config.toml  status.json  metrics.jsonl  .lock
            logs/rank-00003.log
            trace/segment-0002/rank-00003.h5       (.h5.part while the run writes it)
            checkpoints/step-00000100/             (step-00000100.part-<id> while ranks write it; .damaged-<id> after it
                                                    where it was moved aside; .trash-... before it while it is removed)
            reports/spacetime-step-00000012.png
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PART_SUFFIX = ".part"
_SEGMENT = re.compile(r"segment-(\d{4,})")
_TRACE_FILE = re.compile(r"rank-(\d{5,})\.h5(\.part)?")
_CHECKPOINT = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(rf"step-(\d{{8,}}){re.escape(PART_SUFFIX)}-.*")
_TRASH = re.compile(r"\.trash-step-\d{8,}.*")


@dataclass(frozen=True)
class RunPaths:
    """The names under one run folder. Asking for a name creates nothing."""

    root: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(self.root))

    @property
    def config(self) -> Path:
        """The resolved run file."""
        return self.root / "config.toml"

    @property
    def status(self) -> Path:
        """How the run stands or ended, and its exit code."""
        return self.root / "status.json"

    @property
    def lock(self) -> Path:
        """Locked by the launch that writes to the folder."""
        return self.root / ".lock"

    @property
    def metrics(self) -> Path:
        """One JSON line a step, written by one rank."""
        return self.root / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:05d}.log"

    @property
    def trace(self) -> Path:
        return self.root / "trace"

    def trace_segment(self, segment: int) -> Path:
        """The folder of one launch's trace files; segments count from 1."""
        return self.trace / f"segment-{segment:04d}"

    def trace_file(self, segment: int, rank: int) -> Path:
        """A rank's finished trace file."""
        return self.trace_segment(segment) / f"rank-{rank:05d}.h5"

    def trace_part(self, segment: int, rank: int) -> Path:
        """The same file while the run writes it."""
        return part_of(self.trace_file(segment, rank))

    def segments(self) -> tuple[int, ...]:
        """The numbers of the segments on disk, ascending; empty if there is no trace folder."""
        return _numbers(self.trace, _SEGMENT)

    def next_segment(self) -> int:
        """The number after the highest segment on disk; 1 if there is none. Old segments are never written to again."""
        found = self.segments()
        return found[-1] + 1 if found else 1

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """A committed checkpoint's folder."""
        return self.checkpoints / f"step-{step:08d}"

    def checkpoint_part(self, step: int, launch: str) -> Path:
        """The folder that the ranks of one launch (named by ``launch``) write before the commit."""
        return self.checkpoints / f"step-{step:08d}{PART_SUFFIX}-{launch}"

    def checkpoint_steps(self) -> tuple[int, ...]:
        """The steps of the folders that bear a committed checkpoint's name, ascending (not verified)."""
        return _numbers(self.checkpoints, _CHECKPOINT)

    @property
    def reports(self) -> Path:
        return self.root / "reports"


def step_of(path: Path) -> int | None:
    """The step of a folder that bears a committed checkpoint's name; None for another name."""
    match = _CHECKPOINT.fullmatch(path.name)
    return int(match[1]) if match else None


def unfinished_step_of(path: Path) -> int | None:
    """The step of a folder that bears an unfinished checkpoint's name; None for another name."""
    match = _UNFINISHED.fullmatch(path.name)
    return int(match[1]) if match else None


def damaged_name(checkpoint: Path, mark: str) -> Path:
    """Where a damaged checkpoint goes that a new one takes the place of; ``mark`` makes the name new."""
    return checkpoint.with_name(f"{checkpoint.name}.damaged-{mark}")


def trash_name(checkpoint: Path, mark: str) -> Path:
    """The name of a checkpoint's folder while it is removed."""
    return checkpoint.with_name(f".trash-{checkpoint.name}-{mark}")


def is_trash(path: Path) -> bool:
    """Whether a folder is one that was about to be removed."""
    return _TRASH.fullmatch(path.name) is not None


def picture_in(reports: Path, step: int) -> Path:
    """The space-time picture of a step in a folder of reports."""
    return reports / f"spacetime-step-{step:08d}.png"


def part_of(path: Path) -> Path:
    """The name that a file bears until it is whole: ``.part`` after its own."""
    return path.with_name(path.name + PART_SUFFIX)


def closing_of(path: Path) -> Path:
    """The name of a finished trace file's copy while it is made."""
    return path.with_name(path.name + ".closing")


def trace_files(segment: Path) -> list[tuple[int, Path]]:
    """(rank, path) of every trace file in a segment's folder, finished or not, by rank then name.

    A rank appears twice when both its finished file and a ``.part`` are there. Other files are ignored.
    """
    found = []
    for path in segment.iterdir():
        match = _TRACE_FILE.fullmatch(path.name)
        if match:
            found.append((int(match[1]), path))
    return sorted(found)


def _numbers(folder: Path, pattern: re.Pattern[str]) -> tuple[int, ...]:
    if not folder.is_dir():
        return ()
    matches = (pattern.fullmatch(path.name) for path in folder.iterdir())
    return tuple(sorted(int(match[1]) for match in matches if match))
