"""Shards, master file and manifest as files: what is written is what is read, also by h5py alone."""

import json
import shutil
from dataclasses import replace

import h5py
import numpy as np
import pytest
import xxhash

from mpipipe.errors import CheckpointError
from mpipipe.formats import checkpoint as files
from mpipipe.formats import checkpoint_shard


def example_tensors():
    generator = np.random.default_rng(7)
    return {
        "/parameters/h.9.weight": generator.standard_normal((300, 5), dtype=np.float32),
        "/parameters/h.10.weight": generator.standard_normal((4, 6), dtype=np.float32)[::-2, ::3],
        "/parameters/edge": np.array([np.nan, -0.0, np.inf, 1e-45, 3.4e38], dtype=np.float32),
        "/optimizer/exp_avg/h.9.weight": generator.standard_normal((300, 5), dtype=np.float32),
        "/scalar": np.array(2.5, dtype=np.float32),
        "/empty": np.zeros((0, 3), dtype=np.int64),
        "/half": np.array([1.0, 3.140625], dtype=np.float32).view(np.uint32).__rshift__(16).astype(np.uint16),
        "/big_endian": np.arange(5, dtype=">i4"),
    }


def write_folder(folder, tensors, step=7):
    """A whole checkpoint of two shards in ``folder``."""
    folder.mkdir(parents=True)
    names = list(tensors)
    entries = []
    for number, part in enumerate((names[::2], names[1::2])):
        shard = {name: tensors[name] for name in part}
        bfloat16 = {"/half"} & set(shard)
        entries += files.write_shard(folder / files.shard_name(number), shard, bfloat16=bfloat16, config_text="a = 1\n")
    scalars = {"sample": 2**40, "scale": 0.1, "seed": 2**64 - 1, "note": "größer", "best": float("inf")}
    manifest = files.make_manifest(step, {}, entries, {names[0]: ["/parameters/tied"]}, scalars, "a = 1\n")
    files.write_master(folder, manifest)
    manifest = replace(manifest, files={path.name: path.stat().st_size for path in sorted(folder.iterdir())})
    files.write_manifest(folder, manifest)
    return manifest


def test_every_tensor_comes_back_bit_for_bit(tmp_path):
    tensors = example_tensors()
    written = write_folder(tmp_path / "step-00000007", tensors)
    manifest = files.read_manifest(tmp_path / "step-00000007")
    assert manifest == written
    assert set(manifest.tensors) == set(tensors)
    for name, array in tensors.items():
        read = files.read_tensor(tmp_path / "step-00000007", manifest.tensors[name])
        assert read.shape == array.shape
        assert read.tobytes() == np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes()
    assert manifest.find("/parameters/tied") is manifest.tensors["/parameters/h.9.weight"]
    assert manifest.find("/parameters/other") is None
    assert list(files.find_problems(tmp_path / "step-00000007")) == []


def test_checksum_is_that_of_the_bytes(tmp_path):
    [entry] = files.write_shard(tmp_path / "s.h5", {"/a": np.arange(5, dtype=">i4")})
    data = np.arange(5, dtype="<i4").tobytes()
    assert entry.checksum == "xxh3:" + xxhash.xxh3_64(data).hexdigest() == files.checksum_of(np.arange(5, dtype=">i4"))
    assert (tmp_path / "s.h5").read_bytes()[entry.offset : entry.offset + entry.nbytes] == data
    assert (entry.file, entry.shape, entry.dtype, entry.nbytes) == ("s.h5", (5,), "int32", 20)
    assert (
        files.checksum_of(np.zeros(0, np.float32)) == "xxh3:2d06800538d394c2"
    )  # XXH3-64 of nothing, as its authors give it


def test_h5py_reads_the_master_file_after_the_folder_moved(tmp_path):
    tensors = example_tensors()
    write_folder(tmp_path / "here" / "step-00000007", tensors)
    (tmp_path / "there").mkdir()
    moved = shutil.move(tmp_path / "here" / "step-00000007", tmp_path / "there" / "renamed")
    with h5py.File(moved / "checkpoint.h5", "r") as file:
        assert file.attrs["format"] == "mpipipe-checkpoint"
        assert (file.attrs["version"], file.attrs["step"]) == (1, 7)
        for name in ("/parameters/h.9.weight", "/parameters/h.10.weight", "/parameters/edge", "/scalar", "/big_endian"):
            assert np.array_equal(file[name][()], tensors[name], equal_nan=name.endswith("edge"))
        assert np.array_equal(file["/parameters/tied"][()], tensors["/parameters/h.9.weight"])
        assert np.array_equal(file["/half"][()], [1.0, 3.140625])
        assert file["/empty"].shape == (0, 3)
        assert file["config"].asstr()[()] == "a = 1\n"
        assert (file["scalars/sample"][()], file["scalars/seed"][()]) == (2**40, 2**64 - 1)
        assert (file["scalars/scale"][()], file["scalars/note"].asstr()[()]) == (0.1, "größer")
        assert file["parameters/h.9.weight"].id.get_create_plist().get_layout() == h5py.h5d.CONTIGUOUS


def test_a_missing_shard_is_an_error_in_h5py_and_not_zeros(tmp_path):
    write_folder(tmp_path / "c", example_tensors())
    (tmp_path / "c" / "shard-0000.h5").unlink()
    with h5py.File(tmp_path / "c" / "checkpoint.h5", "r") as file, pytest.raises(KeyError):
        file["/parameters/h.9.weight"][()]


def test_large_tensors_are_written_in_slices(tmp_path, monkeypatch):
    sizes = []
    pwrite = checkpoint_shard.os.pwrite
    monkeypatch.setattr(
        checkpoint_shard.os, "pwrite", lambda fd, data, at: sizes.append(len(data)) or pwrite(fd, data[:3_000_000], at)
    )
    array = np.random.default_rng(1).integers(0, 256, 9_000_001, dtype=np.uint8)
    [entry] = files.write_shard(tmp_path / "s.h5", {"/a": array})
    assert max(sizes) == 4 * 2**20
    assert np.array_equal(files.read_tensor(tmp_path, entry), array)


def test_too_little_space_is_told_before_anything_is_written(tmp_path, monkeypatch):
    class Small:
        f_bavail, f_frsize = 10, 4096

    monkeypatch.setattr(checkpoint_shard.os, "statvfs", lambda folder: Small)
    with pytest.raises(CheckpointError, match=r"needs 1054720 bytes there and 40960 are free"):
        files.write_shard(tmp_path / "s.h5", {"/a": np.zeros(1024, np.float32)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a", "", "/", "/a//b", "/a/../b", "/a/.", "/a/", "/a\0b"])
def test_names_that_are_no_dataset_path_are_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="can't be a dataset path"):
        files.write_shard(tmp_path / "s.h5", {name: np.zeros(3, np.float32)})


@pytest.mark.parametrize("name", ["/config", "/scalars/step"])
def test_names_that_have_other_uses_are_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="holds other things in a checkpoint"):
        files.write_shard(tmp_path / "s.h5", {name: np.zeros(3, np.float32)})


def test_types_and_names_that_can_not_be_kept_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="element type complex64 can't be kept"):
        files.write_shard(tmp_path / "a.h5", {"/a": np.zeros(3, np.complex64)})
    with pytest.raises(CheckpointError, match="bits in uint16, not as float32"):
        files.write_shard(tmp_path / "b.h5", {"/a": np.zeros(3, np.float32)}, bfloat16=["/a"])
    with pytest.raises(CheckpointError, match="not among the tensors"):
        files.write_shard(tmp_path / "c.h5", {"/a": np.zeros(3, np.float32)}, bfloat16=["/b"])
    with pytest.raises(CheckpointError, match="can't stand beside"):
        files.write_shard(tmp_path / "d.h5", {"/a": np.zeros(3, np.float32), "/a/b": np.zeros(3, np.float32)})


def test_the_parts_of_a_manifest_must_fit_together(tmp_path):
    entries = files.write_shard(tmp_path / "s.h5", {"/a": np.zeros(3), "/b": np.zeros(3)})
    make = files.make_manifest
    with pytest.raises(CheckpointError, match=r"/a is given twice, in s.h5 and in s.h5; a tensor has one owner"):
        make(1, {}, [*entries, entries[0]], {}, {}, "")
    with pytest.raises(CheckpointError, match="alias /c stands for /x"):
        make(1, {}, entries, {"/x": ["/c"]}, {}, "")
    with pytest.raises(CheckpointError, match="alias /b of /a is also a tensor"):
        make(1, {}, entries, {"/a": ["/b"]}, {}, "")
    with pytest.raises(CheckpointError, match="alias /c of /b is also a tensor of its own or an alias of /a"):
        make(1, {}, entries, {"/a": ["/c"], "/b": ["/c"]}, {}, "")
    for value in (None, 2**64, -(2**63) - 1, [1]):
        with pytest.raises(CheckpointError, match="scalar 'x'"):
            make(1, {}, entries, {}, {"x": value}, "")
    assert make(1, {}, entries, {}, {"x": np.float32(0.5), "y": True}, "").scalars == {"x": 0.5, "y": 1}


def test_manifest_is_plain_json(tmp_path):
    write_folder(tmp_path / "c", example_tensors())
    fields = json.loads((tmp_path / "c" / "manifest.json").read_text(), parse_constant=lambda text: pytest.fail(text))
    assert (fields["format"], fields["version"], fields["step"]) == ("mpipipe-checkpoint", 1, 7)
    assert fields["scalars"]["best"] == {"float": "inf"}
    assert fields["aliases"] == {"/parameters/tied": "/parameters/h.9.weight"}
    assert [item["name"] for item in fields["files"]] == ["checkpoint.h5", "shard-0000.h5", "shard-0001.h5"]
    assert set(fields["tensors"][0]) == {"name", "file", "shape", "dtype", "offset", "nbytes", "checksum"}
