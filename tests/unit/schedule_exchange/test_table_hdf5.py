"""HDF5 files of tables: what stands in them, damage, objects that do not fit, speed."""

import random
import time

import h5py
import numpy as np
import pytest

from mpipipe.errors import TableFileError
from mpipipe.formats import table as format_of_tables
from mpipipe.formats.hdf5 import SIGNATURE
from mpipipe.schedule import ScheduleTable, build
from mpipipe.schedule.exchange import load_table, save_table

TABLE = ScheduleTable.from_rows(
    [["2UNSHARD", "0F0", "(1F1;0B0)OVERLAP_F_B", "1B1"], ["1F0", "1B0", "0F1", "0B1", "0REDUCE_GRAD"]],
    name="two copies",
    v=1,
    m=2,
    placement=[0, 1],
    mirror=[1, 0],
)


@pytest.fixture
def path(tmp_path):
    save_table(TABLE, tmp_path / "table.h5")
    return tmp_path / "table.h5"


def test_what_stands_in_the_file(path):
    with h5py.File(path) as file:
        attributes = {name: value.decode() if isinstance(value, bytes) else value for name, value in file.attrs.items()}
        assert attributes.pop("checksum").startswith("xxh3:")
        assert attributes == {
            "format": "mpipipe-schedule",
            "version": 1,
            "name": "two copies",
            "p": 2,
            "v": 1,
            "m": 2,
            "lowered": False,
        }
        found = {name: (item.dtype.str, item[:].tolist()) for name, item in file.items() if name != "extras"}
        assert found == {
            "placement": ("<i4", [0, 1]),
            "mirror": ("<i4", [1, 0]),
            "offsets": ("<i8", [0, 4, 8]),
            "kinds": ("|u1", [0, 0, 1, 1, 0, 1, 0, 1]),
            "stages": ("<i2", [0, 1, 0, 1, 1, 1, 0, 0]),
            "microbatches": ("<i4", [0, 1, 0, 1, 0, 0, 1, 1]),
            "overlaps": ("<i8", [1]),
        }
        assert file["extras/rank"][:].tolist() == [0, 1]
        assert file["extras/row"][:].tolist() == [0, 4]
        assert file["extras/text"].asstr()[:].tolist() == ["2UNSHARD", "0REDUCE_GRAD"]


def test_the_file_is_the_same_bytes_each_time(path, tmp_path):
    save_table(load_table(path), tmp_path / "again.h5")
    assert (tmp_path / "again.h5").read_bytes() == path.read_bytes()


def replace(file, name, values, dtype):
    del file[name]
    file[name] = np.array(values, dtype=dtype)


def without_checksum(file):
    del file.attrs["checksum"]


CHANGES = [
    (lambda f: f.attrs.__setitem__("format", "mpipipe-tokens"), "format 'mpipipe-tokens' found"),
    (lambda f: f.attrs.__delitem__("format"), "no format attribute"),
    (lambda f: f.attrs.__setitem__("version", 2), "version 2 found.*newer"),
    (lambda f: f.attrs.__delitem__("version"), "without a version"),
    (lambda f: f.attrs.__delitem__("p"), "the attribute p is missing"),
    (lambda f: f.attrs.__setitem__("m", 2.0), "the attribute m is missing or is no integer"),
    (lambda f: f.attrs.__setitem__("m", -1), "p, v and m of at least 1"),
    (lambda f: f.attrs.__setitem__("m", 2**62), "do not fit a table of 8 actions"),
    (lambda f: f.attrs.__setitem__("m", 3), "checksum"),
    (lambda f: f.attrs.__setitem__("p", 3), "placement must have one rank"),
    (lambda f: f.attrs.__delitem__("lowered"), "the attribute lowered"),
    (lambda f: f.attrs.__setitem__("lowered", "no"), "the attribute lowered"),
    (lambda f: f.attrs.__delitem__("name"), "the attribute name"),
    (lambda f: f.attrs.__setitem__("name", 4), "the attribute name"),
    (lambda f: f.__delitem__("kinds"), "/kinds is missing"),
    (lambda f: f.__delitem__("placement"), "/placement is missing"),
    (lambda f: f.__delitem__("mirror"), "checksum"),
    (lambda f: replace(f, "kinds", [[0] * 8], "u1"), "/kinds is missing or is no list of integers"),
    (lambda f: replace(f, "kinds", [0.0] * 8, "f8"), "/kinds is missing or is no list of integers"),
    (lambda f: replace(f, "kinds", [4] * 8, "u1"), "not lowered holds"),
    (lambda f: replace(f, "kinds", [0] * 7, "u1"), "arrays do not fit"),
    (lambda f: replace(f, "kinds", [256] * 8, "i4"), "/kinds holds 256 at 0"),
    (lambda f: replace(f, "stages", [0] * 7 + [-1], "i8"), "/stages holds -1 at 7"),
    (lambda f: replace(f, "stages", [0] * 7 + [65536], "i8"), "/stages holds 65536 at 7: .* 0 to 32767"),
    (lambda f: replace(f, "microbatches", [2**63] * 8, "u8"), "/microbatches holds 9223372036854775808"),
    (lambda f: replace(f, "offsets", [0, 9, 8], "i8"), "offsets must rise"),
    (lambda f: replace(f, "offsets", [0, 8], "i8"), "arrays do not fit"),
    (lambda f: replace(f, "overlaps", [7], "i8"), "overlaps must be"),
    (lambda f: replace(f, "overlaps", [0], "i8"), "(?s)an F and a B"),
    (lambda f: replace(f, "placement", [0, 2], "i4"), "placement must have one rank of 0..1"),
    (lambda f: replace(f, "extras/rank", [0, 2], "i4"), "/extras/rank names rank 2"),
    (lambda f: replace(f, "extras/rank", [0], "i4"), "as many texts"),
    (lambda f: replace(f, "extras/row", [0], "i4"), "/extras/rank has 2 entries and /extras/row 1"),
    (lambda f: replace(f, "extras/text", [1, 2], "i4"), "/extras/text is missing"),
    (lambda f: (f.__delitem__("extras"), f.__setitem__("extras", [1])), "/extras is no group"),
    (lambda f: (f.__delitem__("kinds"), f.create_dataset("kinds", (2**40,), "u1")), "it was never written"),
    (lambda f: (f.__delitem__("kinds"), f.create_group("kinds")), "/kinds is missing"),
]


@pytest.mark.parametrize(("change", "match"), CHANGES, ids=[match for _, match in CHANGES])
def test_what_does_not_fit_is_refused(path, change, match):
    with h5py.File(path, "r+") as file:
        change(file)
        if "checksum" not in match:
            without_checksum(file)
    with pytest.raises(TableFileError, match=match) as caught:
        load_table(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert (caught.value.line, caught.value.cell) == (None, None)


@pytest.mark.parametrize("changed", ["kinds", "stages", "microbatches"])
def test_a_changed_number_is_seen_by_the_checksum(path, changed):
    with h5py.File(path, "r+") as file:
        file[changed][7] = 0
        file[changed][6] = 1
    with pytest.raises(TableFileError, match="checksum"):
        load_table(path)


def test_a_file_of_another_program_needs_no_checksum(path):
    with h5py.File(path, "r+") as file:
        without_checksum(file)
        values = file["stages"][:]
        del file["stages"]
        file.create_dataset("stages", data=values.astype(">u8"), chunks=(3,), compression="gzip")
    assert load_table(path) == TABLE


def test_a_cut_file_is_refused_wherever_it_is_cut(path):
    data = path.read_bytes()
    for length in range(0, len(data), 211):
        path.write_bytes(data[:length])
        with pytest.raises(TableFileError):
            load_table(path)


def test_damaged_bytes_are_refused_or_do_not_matter(path):
    data = path.read_bytes()
    with h5py.File(path) as file:
        places = [(item.id.get_offset(), item.nbytes) for name, item in file.items() if name != "extras"]
    draw = random.Random(1)
    for _ in range(40):
        start, size = draw.choice(places)
        at = start + draw.randrange(size)
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :])
        with pytest.raises(TableFileError):
            load_table(path)


def test_a_million_actions_in_a_second(tmp_path):
    table = build("1f1b", p=128, m=4096)
    assert table.num_actions == 2**20
    begin = time.process_time()
    save_table(table, tmp_path / "table.h5")
    assert load_table(tmp_path / "table.h5") == table
    assert time.process_time() - begin < 2
    assert (tmp_path / "table.h5").stat().st_size < 8 * 2**20


def test_the_signature_is_that_of_the_format(path):
    assert path.read_bytes().startswith(SIGNATURE)
    assert format_of_tables.holds_table(path)
