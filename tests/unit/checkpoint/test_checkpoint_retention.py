"""Which checkpoints stay, and that nothing goes before the newest is known to be sound."""

import os
import shutil
import time

import numpy as np
import pytest

from mpipipe.checkpoint import CheckpointState, find_latest, prune, save
from mpipipe.formats import checkpoint as files
from mpipipe.transport import solo


@pytest.fixture
def folder(tmp_path):
    for step in (8, 9, 10, 11, 100):
        save(solo(), tmp_path, step, CheckpointState({"/a": np.full(100, step, np.float32)}, {}, {}, ""))
    return tmp_path


def steps(folder):
    return [int(path.name[5:]) for path in sorted(folder.iterdir())]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "left"),
    [
        (2, 0, [11, 100]),
        (1, 0, [100]),
        (1, 10, [10, 100]),
        (2, 4, [8, 11, 100]),
        (9, 0, [8, 9, 10, 11, 100]),
        (0, 0, [8, 9, 10, 11, 100]),
        (0, 10, [8, 9, 10, 11, 100]),
    ],
)
def test_which_stay(folder, keep_last, keep_every, left):
    before = steps(folder)
    pruned = prune(folder, keep_last, keep_every)
    assert steps(folder) == left
    assert [int(path.name[5:]) for path in pruned.removed] == [step for step in before if step not in left]
    assert pruned.problem is None


def test_nothing_goes_when_the_newest_is_damaged(folder):
    [entry] = files.read_manifest(folder / "step-00000100").tensors.values()
    path = folder / "step-00000100" / entry.file
    data = bytearray(path.read_bytes())
    data[entry.offset] ^= 1
    path.write_bytes(data)
    pruned = prune(folder, 1)
    assert pruned.removed == ()
    assert "/a has the checksum" in pruned.problem
    assert steps(folder) == [8, 9, 10, 11, 100]
    # With a file cut, it is no complete checkpoint at all: it neither counts among the kept nor is it removed.
    path.write_bytes(data[:-1])
    assert prune(folder, 2, read_newest=False).problem is None
    assert steps(folder) == [10, 11, 100]


def test_a_kill_in_the_midst_leaves_no_half_checkpoint(folder, monkeypatch):
    def kill(path):
        (path / "manifest.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", kill)
    with pytest.raises(KeyboardInterrupt):
        prune(folder, 1)
    monkeypatch.undo()
    assert all(listing.problem is None for listing in files.list_checkpoints(folder))
    assert sum(path.name.startswith(".trash-step-00000008-") for path in folder.iterdir()) == 1
    assert find_latest(folder) == (folder / "step-00000100", [])
    prune(folder, 1)
    assert steps(folder) == [100]


def test_only_dead_unfinished_saves_go(folder):
    long_ago = time.time() - 2 * 3600
    for name in ("step-00000010.part-old", "step-00000010.part-new", "step-00000101.part-old"):
        (folder / name).mkdir()
        (folder / name / "shard-0000.h5").write_bytes(b"x")
        if name.endswith("old"):
            os.utime(folder / name / "shard-0000.h5", (long_ago, long_ago))
            os.utime(folder / name, (long_ago, long_ago))
    assert [path.name for path in prune(folder, 9).removed] == ["step-00000010.part-old"]
    assert {path.name for path in folder.iterdir() if ".part-" in path.name} == {
        "step-00000010.part-new",
        "step-00000101.part-old",
    }


def test_an_empty_or_missing_folder(tmp_path):
    assert prune(tmp_path, 1).removed == ()
    assert prune(tmp_path / "none", 1).removed == ()
