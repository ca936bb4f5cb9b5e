"""Damage by hand: each kind is found, and told by file and cause."""

import json
import shutil
from dataclasses import replace

import h5py
import numpy as np
import pytest
import xxhash

from mpipipe.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointIncompleteError,
    CheckpointNotFoundError,
)
from mpipipe.formats import checkpoint as files


def write_folder(folder, step, value=1.0):
    folder.mkdir(parents=True)
    entries = []
    for number in range(2):
        tensors = {f"/parameters/h.{number}.weight": np.full((40, 30), value + number, np.float32)}
        entries += files.write_shard(folder / files.shard_name(number), tensors)
    manifest = files.make_manifest(step, {}, entries, {}, {"sample": 3}, "x = 1\n")
    files.write_master(folder, manifest)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    files.write_manifest(folder, replace(manifest, files=sizes))
    return files.read_manifest(folder)


def flip_byte(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["shard-0000.h5", "shard-0001.h5", "checkpoint.h5"])
@pytest.mark.parametrize("keep", [-1, 0.5, 0])
def test_a_cut_file(tmp_path, file, keep):
    write_folder(tmp_path / "step-00000001", 1)
    path = tmp_path / "step-00000001" / file
    data = path.read_bytes()
    cut = data[: {-1: len(data) - 1, 0.5: len(data) // 2, 0: 0}[keep]]
    path.write_bytes(cut)
    with pytest.raises(
        CheckpointIncompleteError, match=rf"{file}: the file has {len(cut)} bytes; the manifest says {len(data)}"
    ):
        files.read_manifest(tmp_path / "step-00000001")
    [listing] = files.list_checkpoints(tmp_path)
    assert listing.problem is not None
    assert file in listing.problem


def test_a_missing_file(tmp_path):
    write_folder(tmp_path / "c", 1)
    (tmp_path / "c" / "shard-0001.h5").unlink()
    with pytest.raises(CheckpointIncompleteError, match=r"shard-0001.h5: the file is missing"):
        files.read_manifest(tmp_path / "c")


def test_no_manifest_and_no_folder(tmp_path):
    write_folder(tmp_path / "c", 1)
    (tmp_path / "c" / "manifest.json").unlink()
    with pytest.raises(CheckpointIncompleteError, match=r"there is no manifest.json"):
        files.read_manifest(tmp_path / "c")
    with pytest.raises(CheckpointNotFoundError, match="no such folder"):
        files.read_manifest(tmp_path / "d")


def test_a_flipped_byte_of_a_tensor(tmp_path):
    manifest = write_folder(tmp_path / "c", 1)
    entry = manifest.tensors["/parameters/h.1.weight"]
    flip_byte(tmp_path / "c" / entry.file, entry.offset + entry.nbytes - 1)
    assert files.read_manifest(tmp_path / "c") == manifest
    with pytest.raises(CheckpointCorruptError, match=r"shard-0001.h5: /parameters/h.1.weight has the checksum xxh3:"):
        files.read_tensor(tmp_path / "c", entry)
    assert files.read_tensor(tmp_path / "c", entry, verify=False).shape == (40, 30)
    files.read_tensor(tmp_path / "c", manifest.tensors["/parameters/h.0.weight"])
    assert len(list(files.find_problems(tmp_path / "c"))) == 1


def test_a_flipped_byte_anywhere_in_the_manifest_is_found(tmp_path):
    write_folder(tmp_path / "c", 1)
    path = tmp_path / "c" / "manifest.json"
    good = path.read_bytes()
    for position in range(0, len(good), 3):
        data = bytearray(good)
        data[position] ^= 0x01
        if json.loads(good) == _try_json(data):
            continue  # white space became other white space
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"manifest.json"):
            files.read_manifest(tmp_path / "c")


def _try_json(data):
    try:
        return json.loads(data)
    except ValueError:
        return None


def test_swapped_shards(tmp_path):
    manifest = write_folder(tmp_path / "c", 1)
    first, second = tmp_path / "c" / "shard-0000.h5", tmp_path / "c" / "shard-0001.h5"
    first.rename(tmp_path / "x")
    second.rename(first)
    (tmp_path / "x").rename(second)
    for entry in manifest.tensors.values():
        with pytest.raises(CheckpointCorruptError):
            files.read_tensor(tmp_path / "c", entry)
    assert any(
        "dataset /parameters/h.0.weight is not there" in problem for problem in files.find_problems(tmp_path / "c")
    )


def test_shards_of_two_steps(tmp_path):
    write_folder(tmp_path / "step-00000001", 1, value=1.0)
    manifest = write_folder(tmp_path / "step-00000002", 2, value=2.0)
    shutil.copy(tmp_path / "step-00000001" / "shard-0001.h5", tmp_path / "step-00000002" / "shard-0001.h5")
    files.read_tensor(tmp_path / "step-00000002", manifest.tensors["/parameters/h.0.weight"])
    with pytest.raises(CheckpointCorruptError, match=r"/parameters/h.1.weight"):
        files.read_tensor(tmp_path / "step-00000002", manifest.tensors["/parameters/h.1.weight"])


def test_a_shard_cut_after_the_manifest_was_read(tmp_path):
    manifest = write_folder(tmp_path / "c", 1)
    path = tmp_path / "c" / "shard-0000.h5"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointIncompleteError, match=r"the file ends before /parameters/h.0.weight does"):
        files.read_tensor(tmp_path / "c", manifest.tensors["/parameters/h.0.weight"])
    path.unlink()
    with pytest.raises(CheckpointIncompleteError, match="the file is missing"):
        files.read_tensor(tmp_path / "c", manifest.tensors["/parameters/h.0.weight"])


def test_a_damaged_hdf5_structure_is_found_though_the_tensors_are_sound(tmp_path):
    manifest = write_folder(tmp_path / "c", 1)
    flip_byte(tmp_path / "c" / "shard-0000.h5", 1)
    flip_byte(tmp_path / "c" / "checkpoint.h5", 1)
    for entry in manifest.tensors.values():
        files.read_tensor(tmp_path / "c", entry)
    problems = list(files.find_problems(tmp_path / "c"))
    assert len(problems) == 2
    assert all("not readable as HDF5" in problem for problem in problems)


def test_a_relinked_master_file_is_found(tmp_path):
    manifest = write_folder(tmp_path / "c", 1)
    with h5py.File(tmp_path / "c" / "checkpoint.h5", "r+") as file:
        del file["/parameters/h.0.weight"]
        file["/parameters/h.0.weight"] = h5py.ExternalLink("shard-0001.h5", "/parameters/h.1.weight")
    fixed = replace(
        manifest, files={**manifest.files, "checkpoint.h5": (tmp_path / "c" / "checkpoint.h5").stat().st_size}
    )
    (tmp_path / "c" / "manifest.json").unlink()
    files.write_manifest(tmp_path / "c", fixed)
    [problem] = files.find_problems(tmp_path / "c")
    assert problem.endswith("/parameters/h.0.weight is not the link to its tensor")


def rewrite(path, change):
    """Change the manifest's fields and give it the right checksum again."""
    fields = json.loads(path.read_text())
    change(fields)
    fields.pop("checksum")
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**fields, "checksum": f"xxh3:{xxhash.xxh3_64_hexdigest(text.encode())}"}))


CHANGES = {
    "format": (lambda f: f.update(format="other"), "format 'other' found"),
    "version": (lambda f: f.update(version=2), "version 2 found, 1 to 1 supported; a newer mpipipe"),
    "step": (lambda f: f.update(step=-1), "step: -1 is not a count"),
    "step type": (lambda f: f.update(step="1"), "field 'step': int expected, '1' found"),
    "no config": (lambda f: f.pop("config"), "field 'config': str expected, None found"),
    "outside": (lambda f: f["files"][0].update(name="../x"), "'../x' is no plain file name"),
    "file twice": (lambda f: f["files"].append(f["files"][0]), "is listed twice"),
    "dtype": (lambda f: f["tensors"][0].update(dtype="float31"), "dtype 'float31' and shape"),
    "shape": (lambda f: f["tensors"][0].update(shape=[40, 31]), "do not make 4800 bytes"),
    "shape type": (lambda f: f["tensors"][0].update(shape=["40", 30]), "is not a list of sizes"),
    "offset": (lambda f: f["tensors"][0].update(offset=10**6), "are not in a listed file"),
    "no such file": (lambda f: f["tensors"][0].update(file="shard-0009.h5"), "are not in a listed file"),
    "scalar": (lambda f: f["scalars"].update(sample=[1]), "scalars: sample"),
    "alias": (lambda f: f["aliases"].update({"/a": "/b"}), "alias /a stands for /b"),
    "tensor twice": (lambda f: f["tensors"].append(f["tensors"][0]), "is given twice"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_each_field_of_the_manifest_is_checked(tmp_path, case):
    change, message = CHANGES[case]
    write_folder(tmp_path / "c", 1)
    path = tmp_path / "c" / "manifest.json"
    rewrite(path, lambda fields: None)
    files.read_manifest(tmp_path / "c")
    rewrite(path, change)
    with pytest.raises(CheckpointError) as caught:
        files.read_manifest(tmp_path / "c")
    assert message in str(caught.value)
    assert isinstance(caught.value, CheckpointCorruptError) == (case != "version")


def test_listing_goes_by_number_and_says_why_a_folder_does_not_count(tmp_path):
    for step in (9, 10, 123456789):
        write_folder(tmp_path / f"step-{step:08d}", step)
    write_folder(tmp_path / "step-00000011.part-1a2b", 11)
    (tmp_path / "step-00000012").mkdir()
    write_folder(tmp_path / "step-00000013", 14)
    for other in (".trash-step-00000001-aa", "step-12", "step-00000009.damaged-01", "latest"):
        (tmp_path / other).mkdir()
    listings = files.list_checkpoints(tmp_path)
    assert [listing.step for listing in listings] == [9, 10, 11, 12, 13, 123456789]
    assert [listing.problem is None for listing in listings] == [True, True, False, False, False, True]
    assert "a save that did not end, or has not yet" in listings[2].problem
    assert "no manifest.json" in listings[3].problem
    assert "the manifest is that of step 14" in listings[4].problem
    assert files.list_checkpoints(tmp_path / "nothing") == []
