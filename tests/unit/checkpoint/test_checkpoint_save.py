"""Saving over ranks of one process: what is on disk afterwards, and that all ranks hear of a trouble on one."""

import errno
import os

import numpy as np
import pytest

from mpipipe.checkpoint import CheckpointState, find_latest, load, save, saving
from mpipipe.errors import CheckpointError
from mpipipe.formats import checkpoint as files
from mpipipe.formats import checkpoint_shard
from mpipipe.transport import run_ranks, solo

LAYERS = 12


def parameter_names(layers):
    return [f"/parameters/h.{layer}.weight" for layer in layers]


def whole_state(seed=0):
    """Three tensors a layer, twelve layers: numbers cross 9/10."""
    generator = np.random.default_rng(seed)
    groups = ("parameters", "optimizer/exp_avg", "optimizer/exp_avg_sq")
    return {
        f"/{group}/h.{layer}.weight": generator.standard_normal((8, 5), dtype=np.float32)
        for layer in range(LAYERS)
        for group in groups
    }


def owned(everything, rank, ranks, chunks=1):
    """The tensors of the layers that a rank owns when stages are laid in a loop over the ranks."""
    per_stage = LAYERS // (ranks * chunks)
    layers = {layer for layer in range(LAYERS) if (layer // per_stage) % ranks == rank}
    return {name: array for name, array in everything.items() if int(name.split(".")[1]) in layers}


def state_of(tensors, **changes):
    values = {
        "tensors": tensors,
        "scalars": {"sample": 64, "seed": 5},
        "aliases": {},
        "config_text": "[run]\nseed = 5\n",
    }
    return CheckpointState(**{**values, **changes})


def save_over(folder, step, everything, ranks, chunks=1, **changes):
    return run_ranks(
        ranks, lambda t: save(t, folder, step, state_of(owned(everything, t.rank, ranks, chunks), **changes))
    )


def errors_of(ranks, work):
    """What each rank raised: None where nothing."""

    def run(transport):
        try:
            work(transport)
        except CheckpointError as error:
            return error
        return None

    return run_ranks(ranks, run)


@pytest.mark.parametrize(("ranks", "chunks"), [(1, 1), (2, 1), (4, 1), (2, 3), (3, 2)])
def test_the_tensors_and_checksums_do_not_depend_on_who_saved(tmp_path, ranks, chunks):
    everything = whole_state()
    paths = save_over(tmp_path / "run" / "checkpoints", 10, everything, ranks, chunks)
    target = tmp_path / "run" / "checkpoints" / "step-00000010"
    assert paths == [target] * ranks
    manifest = files.read_manifest(target)
    assert list(files.find_problems(target)) == []
    assert {name: entry.checksum for name, entry in manifest.tensors.items()} == {
        name: files.checksum_of(array) for name, array in everything.items()
    }
    assert (manifest.step, manifest.scalars, manifest.config_text) == (
        10,
        {"sample": 64, "seed": 5},
        "[run]\nseed = 5\n",
    )
    assert sorted(manifest.files) == ["checkpoint.h5", *(files.shard_name(rank) for rank in range(ranks))]
    assert sorted(path.name for path in target.iterdir()) == sorted([*manifest.files, "manifest.json"])
    assert [path.name for path in target.parent.iterdir()] == ["step-00000010"]


def test_a_rank_without_tensors_writes_no_shard(tmp_path):
    run_ranks(
        3, lambda t: save(t, tmp_path, 1, state_of({"/parameters/a": np.ones(3, np.float32)} if t.rank == 1 else {}))
    )
    assert sorted(path.name for path in (tmp_path / "step-00000001").iterdir()) == [
        "checkpoint.h5",
        "manifest.json",
        "shard-0001.h5",
    ]


def test_tied_weights_are_stored_once_and_found_by_both_names(tmp_path):
    tensor = np.arange(6, dtype=np.float32).reshape(2, 3)

    def work(transport):
        if transport.rank == 0:
            return save(
                transport,
                tmp_path,
                1,
                state_of({"/parameters/wte": tensor}, aliases={"/parameters/wte": ("/parameters/head",)}),
            )
        return save(transport, tmp_path, 1, state_of({"/parameters/h.0": np.zeros(2, np.float32)}))

    run_ranks(2, work)
    loaded = load(tmp_path / "step-00000001", ["/parameters/head", "/parameters/wte"])
    assert loaded.tensors["/parameters/head"] is loaded.tensors["/parameters/wte"]
    assert np.array_equal(loaded.tensors["/parameters/head"], tensor)
    assert len(files.read_manifest(tmp_path / "step-00000001").tensors) == 2


def test_scalars_of_all_ranks_are_joined(tmp_path):
    run_ranks(
        2,
        lambda t: save(
            t,
            tmp_path,
            1,
            state_of(
                {f"/a{t.rank}": np.zeros(1)}, scalars={"sample": 7, f"rng_{t.rank}": t.rank, "best": float("nan")}
            ),
        ),
    )
    scalars = files.read_manifest(tmp_path / "step-00000001").scalars
    assert np.isnan(scalars.pop("best"))
    assert scalars == {"sample": 7, "rng_0": 0, "rng_1": 1}


@pytest.mark.parametrize("bad_rank", [0, 1, 2])
@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_full_disk_on_one_rank_is_the_same_error_on_all(tmp_path, monkeypatch, bad_rank, call):
    save_over(tmp_path, 1, whole_state(1), 3)
    before = files.read_manifest(tmp_path / "step-00000001")
    real = getattr(os, call)

    def full(descriptor, *rest):
        if files.shard_name(bad_rank) in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, *rest)

    monkeypatch.setattr(checkpoint_shard.os, call, full)
    everything = whole_state(2)
    errors = errors_of(3, lambda t: save(t, tmp_path, 2, state_of(owned(everything, t.rank, 3))))
    assert len({str(error) for error in errors}) == 1
    assert f"step 2 was not saved: rank {bad_rank}: OSError: [Errno 28] No space left on device" in str(errors[0])
    assert files.shard_name(bad_rank) in str(errors[0])
    assert all(error.seen_alike for error in errors)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    monkeypatch.undo()
    assert files.read_manifest(tmp_path / "step-00000001") == before
    save_over(tmp_path, 2, everything, 3)
    assert find_latest(tmp_path) == (tmp_path / "step-00000002", [])


def test_too_little_space_for_all_ranks_together_is_told_before_anything_is_written(tmp_path, monkeypatch):
    class Space:
        f_bavail, f_frsize = 3000, 1024

    monkeypatch.setattr(checkpoint_shard.os, "statvfs", lambda folder: Space)
    everything = whole_state()
    errors = errors_of(3, lambda t: save(t, tmp_path, 2, state_of(owned(everything, t.rank, 3))))
    needed = 3 * 2**20 + 36 * (2048 + 160)
    assert f"rank 0: {tmp_path}: a checkpoint needs {needed} bytes there and 3072000 are free" in str(errors[2])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step_that_fails", ["write_master", "write_manifest"])
def test_a_trouble_at_the_commit_is_the_same_error_on_all(tmp_path, monkeypatch, step_that_fails):
    def fail(*arguments):
        raise PermissionError(errno.EACCES, "Permission denied", "x")

    monkeypatch.setattr(files, step_that_fails, fail)
    errors = errors_of(2, lambda t: save(t, tmp_path, 2, state_of({f"/a{t.rank}": np.zeros(1)})))
    assert [str(error) for error in errors] == [
        "the checkpoint of step 2 was not saved: rank 0: PermissionError: [Errno 13] Permission denied: 'x'"
    ] * 2
    assert list(tmp_path.iterdir()) == []


def test_the_parent_can_not_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    errors = errors_of(
        2, lambda t: save(t, tmp_path / "file" / "checkpoints", 2, state_of({f"/a{t.rank}": np.zeros(1)}))
    )
    assert all("rank 0: NotADirectoryError" in str(error) for error in errors)


def test_one_tensor_of_two_ranks_is_refused(tmp_path):
    errors = errors_of(2, lambda t: save(t, tmp_path, 2, state_of({"/parameters/h.0": np.full(1, t.rank)})))
    assert all(
        "/parameters/h.0 is given twice, in shard-0000.h5 and in shard-0001.h5" in str(error) for error in errors
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scalars": {"sample": 1}}, "scalar 'sample' is 64 on rank 0 and 1 on rank 1"),
        ({"config_text": "other"}, "rank 1 and rank 0 do not save the same: the config differs"),
    ],
)
def test_ranks_that_do_not_agree_are_refused(tmp_path, changes, message):
    errors = errors_of(
        2, lambda t: save(t, tmp_path, 2, state_of({f"/a{t.rank}": np.zeros(1)}, **(changes if t.rank == 1 else {})))
    )
    assert all(message in str(error) for error in errors)
    errors = errors_of(2, lambda t: save(t, tmp_path, 2 + t.rank, state_of({f"/a{t.rank}": np.zeros(1)})))
    assert all("the step differs" in str(error) for error in errors)
    assert list(tmp_path.iterdir()) == []


def test_a_complete_checkpoint_of_the_step_is_kept(tmp_path):
    everything = whole_state()
    save_over(tmp_path, 5, everything, 2)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "step-00000005").iterdir()}
    # The same state, from another number of ranks and under another run file: nothing to do.
    save_over(tmp_path, 5, everything, 3, config_text="steps = 9")
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "step-00000005").iterdir()} == before
    for other, changes in (
        (whole_state(1), {}),
        (everything, {"scalars": {"sample": 65, "seed": 5}}),
        (dict(list(everything.items())[3:]), {}),
    ):
        errors = errors_of(2, lambda t, o=other, c=changes: save(t, tmp_path, 5, state_of(owned(o, t.rank, 2), **c)))
        assert all("is there already, complete, and holds another state" in str(error) for error in errors)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "step-00000005").iterdir()} == before


def test_a_damaged_checkpoint_of_the_step_is_moved_aside(tmp_path, caplog):
    save_over(tmp_path, 5, whole_state(), 2)
    (tmp_path / "step-00000005" / "shard-0001.h5").unlink()
    save_over(tmp_path, 5, whole_state(), 2)
    aside, good = sorted(tmp_path.iterdir(), key=lambda path: -len(path.name))
    assert (good.name, aside.name[:22]) == ("step-00000005", "step-00000005.damaged-")
    assert list(files.find_problems(good)) == []
    assert (aside / "shard-0000.h5").exists()
    assert "the file is missing" in caplog.text


def test_leftovers_of_killed_launches_are_left_alone(tmp_path):
    (tmp_path / "step-00000005.part-00aa").mkdir()
    (tmp_path / "step-00000005.part-00aa" / "manifest.json").write_text("{")
    save_over(tmp_path, 5, whole_state(), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000005.part-00aa"]


def test_a_folder_that_shows_up_late_is_waited_for(tmp_path, monkeypatch):
    answers = iter([False, False])
    monkeypatch.setattr(saving.time, "sleep", lambda seconds: None)
    saving._wait_until(lambda: next(answers, True), "not seen")
    monkeypatch.setattr(saving, "VISIBLE_WITHIN_S", 0.0)
    with pytest.raises(CheckpointError, match=r"not seen \(waited 0 s\)"):
        saving._wait_until(lambda: False, "not seen")


def test_negative_steps_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="step -1 can't be saved"):
        save(solo(), tmp_path, -1, state_of({}))
