"""Saving: whole or not at all, and never over a file of another kind."""

import os
import time

import h5py
import pytest

from mpipipe.errors import ScheduleError, TableFileError
from mpipipe.schedule import build
from mpipipe.schedule.exchange import TABLE_FORMS, load_table, save_table

TABLE = build("1f1b", p=2, m=2)


@pytest.mark.parametrize("form", TABLE_FORMS)
def test_a_table_replaces_a_table_of_its_kind(tmp_path, form):
    path = tmp_path / "table"
    path.write_bytes(b"")
    save_table(build("gpipe", p=3, m=3), path, form)
    save_table(TABLE, path, form)
    assert load_table(path).p == 2
    assert list(tmp_path.iterdir()) == [path]


def other_hdf5(path):
    with h5py.File(path, "w") as file:
        file.attrs["format"] = "mpipipe-tokens"


OTHERS = {
    "text": lambda path: path.write_text("Dear diary, today\n"),
    "numbers": lambda path: path.write_text("1,2,3\n"),
    "json": lambda path: path.write_text("{}"),
    "bytes": lambda path: path.write_bytes(bytes(range(256))),
    "tokens": other_hdf5,
    "broken HDF5": lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n"),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("form", TABLE_FORMS)
def test_a_file_of_another_kind_is_kept(tmp_path, form, other):
    path = tmp_path / "table.csv"
    OTHERS[other](path)
    before = path.read_bytes()
    with pytest.raises(TableFileError, match="and is kept: choose another name"):
        save_table(TABLE, path, form)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_csv_and_hdf5_are_two_kinds(tmp_path):
    for name, form in (("a", "csv"), ("b", "h5")):
        save_table(TABLE, tmp_path / name, form)
    for name, form in (("a", "h5"), ("b", "csv"), ("b", "torch-csv")):
        with pytest.raises(TableFileError, match="is kept"):
            save_table(TABLE, tmp_path / name, form)
        assert load_table(tmp_path / name) == TABLE


@pytest.mark.parametrize("form", ["csv", "h5"])
def test_a_trouble_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, form):
    path = tmp_path / "table"
    save_table(TABLE, path, form)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(TableFileError, match="No space left on device"):
        save_table(build("gpipe", p=3, m=3), path, form)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_what_can_not_be_written(tmp_path):
    with pytest.raises(TableFileError, match="No such file"):
        save_table(TABLE, tmp_path / "no" / "table.csv")
    with pytest.raises(TableFileError, match="is a folder"):
        save_table(TABLE, tmp_path, "csv")
    with pytest.raises(TableFileError, match=r"take \.csv or \.h5"):
        save_table(TABLE, tmp_path / "table.odd")
    with pytest.raises(ScheduleError, match="unknown form 'xls'"):
        save_table(TABLE, tmp_path / "table.csv", "xls")
    assert list(tmp_path.iterdir()) == []


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path):
    save_table(TABLE, tmp_path / "real.csv")
    (tmp_path / "link.csv").symlink_to("real.csv")
    save_table(build("gpipe", p=3, m=3), tmp_path / "link.csv")
    assert (tmp_path / "link.csv").is_symlink()
    assert load_table(tmp_path / "real.csv").p == 3
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    save_table(TABLE, tmp_path / "pipe", "torch-csv")
    assert os.read(reader, 1000) == b"0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    os.close(reader)
    save_table(TABLE, "/dev/null", "csv")
    assert not os.path.isfile("/dev/null")


def test_a_large_csv_goes_fast_enough(tmp_path):
    """A million actions within 10 s each way: a quarter of them here."""
    table = build("1f1b", p=64, m=2048)
    begin = time.process_time()
    save_table(table, tmp_path / "table.csv")
    assert load_table(tmp_path / "table.csv") == table
    assert time.process_time() - begin < 5
