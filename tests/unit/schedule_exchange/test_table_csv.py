"""Our CSV and CSV without a header: what is written, what is read, and where a wrong file is wrong."""

import pytest

from mpipipe.errors import ScheduleError, TableFileError
from mpipipe.schedule import ScheduleTable, build, find_problems, lower
from mpipipe.schedule.exchange import load_table, load_with_places, save_table, table_text

HEADER = """\
# format = mpipipe-schedule
# version = 1
# name = 1f1b
# p = 2
# v = 1
# m = 2
# placement = 0 1
# lowered = false
"""
ROWS = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
BOTH_WAYS = ScheduleTable.from_rows(
    [["0F0", "(1F1;0B0)OVERLAP_F_B", "1B1", "2REDUCE_GRAD"], ["1F0", "1B0", "0F1", "0B1"]],
    name="two copies",
    v=1,
    m=2,
    placement=[0, 1],
    mirror=[1, 0],
)


def file_of(tmp_path, text, name="table.csv"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_the_file_of_a_table_is_this(tmp_path):
    path = tmp_path / "table.csv"
    save_table(build("1f1b", p=2, m=2), path)
    assert path.read_text() == HEADER + ROWS
    assert [each.name for each in tmp_path.iterdir()] == ["table.csv"]


def test_the_file_of_a_table_with_two_copies_is_this():
    header = HEADER.replace("1f1b", "two copies").replace("# lowered", "# mirror = 1 0\n# lowered")
    rows = "0F0,(1F1;0B0)OVERLAP_F_B,1B1,2REDUCE_GRAD\n1F0,1B0,0F1,0B1\n"
    assert table_text(BOTH_WAYS, "csv") == header + rows


@pytest.mark.parametrize(
    "table",
    [
        build("interleaved", p=3, v=2, m=6),
        lower(build("interleaved", p=3, v=2, m=6)),
        lower(build("gpipe", p=1, m=2)),
        BOTH_WAYS,
        ScheduleTable.from_rows([["0F0"], [], []], v=1, m=5, placement=[0, 1, 2]),
        ScheduleTable.from_rows([["00F001", "1F99"], ["7B3"]], v=2, m=3, placement=[1, 1, 0, 0], name="wrong: a=b"),
        ScheduleTable.from_rows([["5UNSHARD", "0F0", "0B0", "5RESHARD"], ["2UNSHARD"]], v=1, m=1, placement=[0, 1]),
    ],
    ids=lambda table: table.name,
)
@pytest.mark.parametrize("ending", [".csv", ".h5", ".hdf5", ".CSV"])
def test_a_table_comes_back_as_it_was(tmp_path, table, ending):
    path = tmp_path / f"table{ending}"
    save_table(table, path)
    found = load_table(path)
    assert found == table
    assert (found.name, found.extras) == (table.name, table.extras)


@pytest.mark.parametrize(
    "text",
    [
        HEADER + ROWS,
        (HEADER + ROWS).replace("\n", "\r\n"),
        b"\xef\xbb\xbf" + (HEADER + ROWS).encode(),
        HEADER + ROWS.rstrip("\n"),
        HEADER + ROWS + "\n  \n",
        HEADER.replace("\n", ",,\n") + ROWS.replace("\n", ",,,\n"),
        HEADER.replace("# ", "#").replace(" = ", "=") + ROWS,
        HEADER + ROWS.replace(",", " , ,"),
        HEADER + ROWS.replace("0F1", '"0F1"'),
        HEADER.replace("# lowered = false\n", "") + ROWS,
        HEADER.replace("# name = 1f1b\n", "") + ROWS,
        "".join(reversed(HEADER.splitlines(keepends=True))) + ROWS,
        ROWS,
        ROWS.replace("1F0", ",,1F0"),
        ROWS.replace("\n", "\r\n"),
        b"\xef\xbb\xbf" + ROWS.encode(),
    ],
)
def test_what_does_not_matter(tmp_path, text):
    assert load_table(file_of(tmp_path, text)) == build("1f1b", p=2, m=2)


def test_a_file_is_read_by_what_it_holds(tmp_path):
    table = build("1f1b", p=2, m=2)
    save_table(table, tmp_path / "table.h5")
    (tmp_path / "table.h5").rename(tmp_path / "table.csv")
    assert load_table(tmp_path / "table.csv") == table
    assert load_table(file_of(tmp_path, ROWS, "table")) == table
    with pytest.raises(TableFileError, match="is no HDF5 file"):
        load_table(file_of(tmp_path, ROWS, "other.h5"))


def test_without_a_header_all_is_read_off_the_rows(tmp_path):
    table = build("interleaved", p=2, v=3, m=4)
    path = tmp_path / "table.csv"
    save_table(table, path, "torch-csv")
    assert load_table(path) == table
    assert load_table(path).name == "custom"
    save_table(table, path, "torch-comms-csv")
    assert load_table(path) == lower(table)


def test_places(tmp_path):
    text = HEADER + "0F0,,2UNSHARD,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,,1F1,1B1\n"
    loaded = load_with_places(file_of(tmp_path, text))
    assert [loaded.place(0, row) for row in range(4)] == [(9, 1), (9, 4), (9, 4), (9, 5)]
    assert [loaded.place(1, row) for row in range(4)] == [(10, 1), (10, 2), (10, 4), (10, 5)]
    assert loaded.place(1) == (10, None)
    assert loaded.where(1, 2) == f"{loaded.file}:10, cell 4"
    assert loaded.where(1) == f"{loaded.file}:10"
    save_table(loaded.table, tmp_path / "table.h5")
    loaded = load_with_places(tmp_path / "table.h5")
    assert loaded.place(1, 2) is None
    assert loaded.where(1, 2) == str(tmp_path / "table.h5")


def test_an_illegal_table_is_read_and_its_problems_have_places(tmp_path):
    loaded = load_with_places(file_of(tmp_path, HEADER + "0B0,0F0,,,0F1,0B1\n1F0,1B0,1F1,1B1,0F1\n"))
    problems = find_problems(loaded.table)
    places = {(problem.kind, problem.action, loaded.place(problem.rank, problem.row)) for problem in problems}
    assert ("order", "0B0", (9, 1)) in places
    assert ("owner", "0F1", (10, 5)) in places


def changed(old, new):
    assert old in HEADER + ROWS
    return (HEADER + ROWS).replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "line", "cell", "match"),
    [
        ("", 1, None, "empty"),
        ("\n \n", 1, None, "empty"),
        (",,\n", 1, 1, "no cell of the file holds an action"),
        (HEADER, 8, None, "0 rows found, the header says p = 2"),
        (changed("0F1", "0X1"), 9, 2, "'0X1' is no action"),
        (changed("1F1", "1f1"), 10, 3, "'1f1' is no action"),
        (changed("0F1", "F1"), 9, 2, "'F1' is no action"),
        (changed("0F1", "-1F1"), 9, 2, "'-1F1' is no action"),
        (changed("0F1", "0F1x"), 9, 2, "'0F1x' is no action"),
        (changed("0F1", "\N{ARABIC-INDIC DIGIT ONE}F1"), 9, 2, "is no action"),
        (changed("0F1", "\N{NO-BREAK SPACE}0F1"), 9, 2, r"'\\xa00F1' is no action"),
        (changed("0F1", "0F1234567890"), 9, 2, "more than 9 digits"),
        (changed("0F1", "32768F1"), 9, 2, "stages go up to 32767"),
        (changed("0F1", "(0F1;1F0)OVERLAP_F_B"), 9, 2, "no pair"),
        (changed("0F1", "(0F1;0B0)"), 9, 2, "is no action"),
        (changed("0F1", "x" * 500), 9, 2, r"'x{57}\.\.\.'"),
        (changed("0F1", "\x1b[31m"), 9, 2, r"'\\x1b\[31m'"),
        (changed("0F1", '"0F1'), 9, 2, "quotation mark"),
        (changed("0F0,0F1,0B0,0B1", "0F0;0F1;0B0;0B1"), 9, 1, "a comma between them"),
        (changed("0F0,0F1,0B0,0B1", "0F0\t0F1"), 9, 1, "a comma between them"),
        (changed("1F0", "# a note\n1F0"), 10, 1, "header lines .* stand before the first row"),
        (changed("1F0", "\n1F0"), 10, None, "an empty line between rows"),
        (changed("0F1", "0F\x001"), 9, 2, "NUL"),
        (changed("1f1b", "1f\x001b"), 3, None, "NUL"),
        (changed("1F1", "1F1\r"), 10, 3, "carriage return"),
        (changed("1f1b", "\N{LATIN SMALL LETTER E WITH ACUTE}").encode("latin-1"), 3, None, "0xe9 is no UTF-8"),
        (changed("0B0", "\N{LATIN SMALL LETTER E WITH ACUTE}").encode("latin-1"), 9, 3, "0xe9 is no UTF-8"),
        ((HEADER + ROWS).encode("utf-16"), 1, None, "UTF-16"),
        (HEADER + ROWS + "2F0\n", 11, None, "3 rows found, the header says p = 2"),
        (changed("1F0,1B0,1F1,1B1\n", ""), 9, None, "1 rows found, the header says p = 2 .line 4."),
        (changed("# p = 2\n", ""), 1, None, "no line '# p = ...'"),
        (changed("# format = mpipipe-schedule\n", ""), 1, None, "no line '# format = ...'"),
        (changed("# version = 1\n", ""), 1, None, "no line '# version = ...'"),
        (changed("# placement = 0 1\n", ""), 1, None, "no line '# placement = ...'"),
        (changed("mpipipe-schedule", "mpipipe-trace"), 1, None, "format 'mpipipe-trace' found"),
        (changed("version = 1", "version = 2"), 2, None, "version = 2 found, 1 supported; a newer mpipipe"),
        (changed("version = 1", "version = one"), 2, None, "a whole number"),
        (changed("# p = 2", "# p = 0"), 4, None, "a whole number, 1 or more"),
        (changed("# p = 2", "# p = 2.0"), 4, None, "a whole number"),
        (changed("# p = 2", "# p = 99999999999999999999"), 4, None, "at most 9 digits"),
        (changed("# p = 2", "# p = 40000"), 4, None, "40000 stages"),
        (changed("# m = 2", "# m = 900000000"), 6, None, "do not fit a table of 8 actions"),
        (changed("# m = 2", "# m"), 6, None, "no header line"),
        (changed("# m = 2", "# n = 2"), 6, None, "unknown key 'n'"),
        (changed("# placement", "# placment"), 7, None, "did you mean 'placement'"),
        (changed("# m = 2", "# p = 2"), 6, None, "p stands on line 4 already"),
        (changed("placement = 0 1", "placement = 0 2"), 7, None, "'2' ...: the ranks are 0..1"),
        (changed("placement = 0 1", "placement = 0"), 7, None, "1 ranks, one for each of the p.v = 2 stages"),
        (changed("# lowered", "# mirror = 1\n# lowered"), 8, None, "mirror = 1 ranks"),
        (changed("lowered = false", "lowered = no"), 8, None, "true or false"),
        (changed("1B1", "1SEND_B1"), 10, 4, "'1SEND_B1': a message in a table that is not lowered .line 8"),
        ("# a note\n" + ROWS, 1, None, "no header line"),
        ("0F0,0F1\n2F0,2F1\n", 2, 1, "'2F0': stages go up to 2, but no row names stage 1"),
        ("0F0\n1F0,2F0\n", 2, 2, "'2F0': 3 stages do not go evenly on 2 rows"),
        ("0F0\n,\n", 1, 1, "1 stages do not go evenly on 2 rows"),
        ("0F0,0F999999999\n", 1, 2, "do not fit a table of 2 actions"),
        ('{"rows": []}', 1, None, "is JSON"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(tmp_path, text, line, cell, match):
    path = file_of(tmp_path, text)
    with pytest.raises(TableFileError, match=match) as caught:
        load_table(path)
    error = caught.value
    assert (error.line, error.cell, error.file) == (line, cell, str(path))
    assert isinstance(error, ScheduleError)
    where = f"{path}:{line}: " if cell is None else f"{path}:{line}, cell {cell}: "
    assert str(error).startswith(where)
    assert str(error).replace(str(path), "").isprintable()


def test_what_can_not_be_read(tmp_path):
    with pytest.raises(TableFileError, match="there is no such file"):
        load_table(tmp_path / "none.csv")
    with pytest.raises(TableFileError, match="is a folder"):
        load_table(tmp_path)
    with pytest.raises(TableFileError, match="can't be read"):
        load_table("a\0b.csv")


def test_a_name_of_two_lines_is_not_written(tmp_path):
    table = ScheduleTable.from_rows([["0F0"]], name="a\n# m = 9")
    for ending in ("csv", "h5"):
        with pytest.raises(ScheduleError, match="another name"):
            save_table(table, tmp_path / f"table.{ending}")
    assert list(tmp_path.iterdir()) == []
