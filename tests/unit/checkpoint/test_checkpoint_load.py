"""Finding and loading: by name, into any number of ranks, past whatever is damaged."""

import numpy as np
import pytest

from mpipipe.checkpoint import CheckpointState, check_names, find_latest, load, restore, save
from mpipipe.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointIncompleteError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)
from mpipipe.formats import checkpoint as files
from mpipipe.transport import run_ranks, solo

LAYERS = 12


def whole_state(seed):
    generator = np.random.default_rng(seed)
    return {
        f"/{group}/h.{layer}.weight": generator.standard_normal((8, 5), dtype=np.float32)
        for layer in range(LAYERS)
        for group in ("parameters", "optimizer/exp_avg", "optimizer/exp_avg_sq")
    }


def owned(everything, rank, ranks, chunks):
    per_stage = LAYERS // (ranks * chunks)
    layers = {layer for layer in range(LAYERS) if (layer // per_stage) % ranks == rank}
    return {name: array for name, array in everything.items() if int(name.split(".")[1]) in layers}


def save_over(folder, step, everything, ranks=2, chunks=1):
    run_ranks(
        ranks,
        lambda t: save(
            t, folder, step, CheckpointState(owned(everything, t.rank, ranks, chunks), {"sample": step}, {}, "c = 1")
        ),
    )
    return folder / f"step-{step:08d}"


def kinds(tensors):
    return {name: (array.shape, array.dtype.name) for name, array in tensors.items()}


def restore_over(checkpoints_dir, everything, ranks=2, chunks=1, **options):
    """Each rank's (loaded, skipped)."""

    def work(transport):
        return restore(transport, checkpoints_dir, kinds(owned(everything, transport.rank, ranks, chunks)), **options)

    return run_ranks(ranks, work)


def flip_byte(folder, name):
    entry = files.read_manifest(folder).tensors[name]
    path = folder / entry.file
    data = bytearray(path.read_bytes())
    data[entry.offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (1, 1), (2, 3), (3, 2), (4, 1), (12, 1)])
def test_saved_by_four_ranks_and_restored_by_any(tmp_path, ranks, chunks):
    everything = whole_state(3)
    save_over(tmp_path, 9, everything, 4)
    merged = {}
    for loaded, skipped in restore_over(tmp_path, everything, ranks, chunks):
        assert (loaded.step, loaded.scalars, loaded.config_text, skipped) == (9, {"sample": 9}, "c = 1", [])
        assert not set(merged) & set(loaded.tensors)
        merged |= loaded.tensors
    assert set(merged) == set(everything)
    for name, array in everything.items():
        assert merged[name].dtype == np.float32
        assert merged[name].tobytes() == array.tobytes()


def test_only_the_files_that_hold_the_names_are_opened(tmp_path, monkeypatch):
    everything = whole_state(3)
    folder = save_over(tmp_path, 9, everything, 4)
    data = (folder / "shard-0003.h5").read_bytes()
    (folder / "shard-0003.h5").write_bytes(bytes(len(data)))
    names = ["/parameters/h.0.weight", "/optimizer/exp_avg/h.8.weight"]
    loaded = load(folder, names)
    assert list(loaded.tensors) == names
    assert np.array_equal(loaded.tensors[names[1]], everything[names[1]])
    with pytest.raises(CheckpointCorruptError, match=r"shard-0003.h5: /parameters/h.9.weight"):
        load(folder, ["/parameters/h.9.weight"])
    assert load(folder, ["/parameters/h.9.weight"], verify=False).tensors["/parameters/h.9.weight"].sum() == 0


def test_a_name_that_is_not_there_is_told_with_the_nearest(tmp_path):
    folder = save_over(tmp_path, 9, whole_state(3))
    with pytest.raises(
        CheckpointMismatchError, match=r"does not hold /parameters/h.3.wieght \(nearest: /parameters/h.3.weight\)"
    ):
        load(folder, ["/parameters/h.3.wieght"])
    with pytest.raises(CheckpointNotFoundError):
        load(tmp_path / "step-00000001", [])


def test_newest_goes_by_number(tmp_path):
    for step in (9, 10, 100, 99):
        save_over(tmp_path, step, whole_state(step))
    assert find_latest(tmp_path) == (tmp_path / "step-00000100", [])
    assert find_latest(tmp_path / "none") == (None, [])


def test_what_is_damaged_is_passed_over_with_its_reason(tmp_path):
    everything = whole_state(0)
    for step in (1, 2, 3, 4, 5):
        save_over(tmp_path, step, whole_state(step))
    (tmp_path / "step-00000009.part-ab").mkdir()
    (tmp_path / "step-00000005" / "manifest.json").unlink()
    (tmp_path / "step-00000004" / "shard-0001.h5").unlink()
    flip_byte(tmp_path / "step-00000003", "/parameters/h.11.weight")
    latest, skipped = find_latest(tmp_path)
    assert latest == tmp_path / "step-00000003"
    reasons = ["a save that did not end", "there is no manifest.json", "shard-0001.h5: the file is missing"]
    assert len(skipped) == 3
    assert all(reason in text for reason, text in zip(reasons, skipped, strict=True))
    latest, skipped = find_latest(tmp_path, verify=True)
    assert latest == tmp_path / "step-00000002"
    assert "/parameters/h.11.weight has the checksum" in skipped[3]
    # Only rank 1 reads the flipped byte; both ranks go back to step 2.
    for loaded, texts in restore_over(tmp_path, everything):
        assert (loaded.step, loaded.folder) == (2, tmp_path / "step-00000002")
        assert len(texts) == 4
        assert all(reason in text for reason, text in zip([*reasons, "rank 1: "], texts, strict=True))
        assert "/parameters/h.11.weight has the checksum" in texts[3]


def test_swapped_and_mixed_shards_are_passed_over(tmp_path):
    everything = whole_state(0)
    for step in (1, 2, 3):
        save_over(tmp_path, step, whole_state(step))
    third, second = tmp_path / "step-00000003", tmp_path / "step-00000002"
    (third / "shard-0000.h5").rename(third / "x")
    (third / "shard-0001.h5").rename(third / "shard-0000.h5")
    (third / "x").rename(third / "shard-0001.h5")
    (second / "shard-0000.h5").write_bytes((tmp_path / "step-00000001" / "shard-0000.h5").read_bytes())
    for loaded, texts in restore_over(tmp_path, everything):
        assert loaded.step == 1
        assert len(texts) == 2


def test_nothing_to_restore(tmp_path):
    assert restore_over(tmp_path / "checkpoints", whole_state(0)) == [(None, [])] * 2
    (tmp_path / "step-00000001").mkdir()
    for loaded, texts in restore_over(tmp_path, whole_state(0)):
        assert loaded is None
        assert len(texts) == 1


def test_a_damaged_checkpoint_asked_for_by_name_is_an_error_on_all_ranks(tmp_path):
    everything = whole_state(0)
    for step in (1, 2):
        save_over(tmp_path, step, everything)
    flip_byte(tmp_path / "step-00000002", "/parameters/h.11.weight")

    def work(transport):
        mine = kinds(owned(everything, transport.rank, 2, 1))
        with pytest.raises(CheckpointError) as caught:
            restore(transport, tmp_path, mine, folder=tmp_path / "step-00000002")
        return type(caught.value), str(caught.value), caught.value.seen_alike

    first, second = run_ranks(2, work)
    assert first == second
    assert first[0] is CheckpointCorruptError
    assert first[1].startswith("rank 1: ")
    assert first[2]
    assert restore_over(tmp_path, everything, folder=tmp_path / "step-00000001")[1][0].step == 1
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    with pytest.raises(CheckpointIncompleteError):
        restore(solo(), tmp_path, {}, folder=tmp_path / "step-00000002")


def test_another_model_is_an_error_and_not_passed_over(tmp_path):
    everything = whole_state(0)
    save_over(tmp_path, 1, everything)
    wider = {name: np.zeros((8, 6)) for name in everything}
    with pytest.raises(
        CheckpointMismatchError, match=r"is \(8, 5\) in the checkpoint and \(8, 6\) in the model; .*, and 31 more"
    ):
        restore_over(tmp_path, wider)
    shorter = {name: array for name, array in everything.items() if "h.11." not in name}
    with pytest.raises(CheckpointMismatchError, match=r"the checkpoint also holds /optimizer/exp_avg/h.11.weight"):
        restore_over(tmp_path, shorter)


def test_names_are_compared_strictly(tmp_path):
    tensors = {"/parameters/wte": np.zeros((4, 2)), "/parameters/h.0": np.zeros(3)}
    save(solo(), tmp_path, 1, CheckpointState(tensors, {}, {"/parameters/wte": ("/parameters/head",)}, ""))
    manifest = files.read_manifest(tmp_path / "step-00000001")
    check_names(manifest, {"/parameters/wte", "/parameters/h.0"})
    check_names(manifest, {"/parameters/head", "/parameters/h.0"}, {"/parameters/head": ((4, 2), "float64")})
    with pytest.raises(
        CheckpointMismatchError,
        match=r"the checkpoint lacks /parameters/h0 \(nearest: /parameters/h.0\); the checkpoint also holds",
    ):
        check_names(manifest, {"/parameters/wte", "/parameters/h0"})
    with pytest.raises(CheckpointMismatchError, match=r"the checkpoint also holds /parameters/wte"):
        check_names(manifest, {"/parameters/h.0"})
    with pytest.raises(
        CheckpointMismatchError, match=r"/parameters/head is \(4, 2\) in the checkpoint and \(2, 4\) in the model"
    ):
        check_names(manifest, {"/parameters/head", "/parameters/h.0"}, {"/parameters/head": ((2, 4), "float64")})
    with pytest.raises(
        CheckpointMismatchError, match=r"/parameters/head is float64 in the checkpoint and float32 in the model"
    ):
        check_names(manifest, {"/parameters/head", "/parameters/h.0"}, {"/parameters/head": ((4, 2), "float32")})
    with pytest.raises(CheckpointMismatchError, match=r"x4 and 2 more"):
        check_names(manifest, {"/parameters/wte", "/parameters/h.0", *(f"x{number}" for number in range(7))})
