"""``schedule convert``, and ``schedule show`` of a file."""

import csv
import json

import h5py
import pytest

from mpipipe.cli import main
from mpipipe.schedule import build, lower
from mpipipe.schedule.exchange import load_table, save_table

TABLE = build("interleaved", p=2, v=2, m=4)


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_table(TABLE, tmp_path / "table.csv")
    return "table.csv"


def error_of(capsys, *arguments):
    assert main([*arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    return said.err


@pytest.mark.parametrize(
    ("target", "form", "expected"),
    [
        ("b.csv", None, TABLE),
        ("b.h5", None, TABLE),
        ("b.hdf5", None, TABLE),
        ("b", "csv", TABLE),
        ("b.table", "h5", TABLE),
        ("b.csv", "torch-csv", TABLE),
        ("b.csv", "torch-comms-csv", lower(TABLE)),
    ],
)
def test_convert_tables(capsys, path, target, form, expected):
    assert main(["schedule", "convert", path, target, *(["--format", form] if form else [])]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    assert load_table(target) == expected
    assert main(["schedule", "convert", target, "back.csv"]) == 0
    assert load_table("back.csv") == expected


def test_convert_to_figures_and_a_timeline(capsys, path):
    assert main(["schedule", "convert", path, "b.json", "--cost", "F=2", "--latency", "1"]) == 0
    with open("b.json") as file:
        found = json.load(file)
    assert (found["costs"]["F"], found["latency"], found["rows"]) == (2, 1, TABLE.rows())
    assert main(["schedule", "convert", path, "timeline.json", "--format", "chrome"]) == 0
    with open("timeline.json") as file:
        found = json.load(file)
    assert sum(event["ph"] == "X" and event["cat"] == "compute" for event in found["traceEvents"]) == TABLE.num_actions


def test_convert_keeps_what_torch_says_besides(path):
    rows = [["0UNSHARD", "", "0F0", "0B0", "0REDUCE_GRAD"], ["", "1F0", "1B0"]]
    with open("torch.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    for step in (("torch.csv", "a.h5"), ("a.h5", "a.csv"), ("a.csv", "back.csv", "--format", "torch-csv")):
        assert main(["schedule", "convert", *step]) == 0
    with open("back.csv") as file:
        assert file.read() == "0UNSHARD,0F0,0B0,0REDUCE_GRAD\n1F0,1B0\n"


def test_convert_refusals(capsys, path):
    assert "OUT: can't tell the format of b.odd" in error_of(capsys, "schedule", "convert", path, "b.odd")
    assert "draws" in error_of(capsys, "schedule", "convert", path, "b.png")
    assert "there is no such file" in error_of(capsys, "schedule", "convert", "no.csv", "b.csv")
    with open("broken.csv", "w") as file:
        file.write("0F0,0B0\n1F0,1Q0\n")
    said = error_of(capsys, "schedule", "convert", "broken.csv", "b.h5")
    assert said.startswith("error: broken.csv:2, cell 2: '1Q0' is no action")
    with h5py.File("tokens.h5", "w") as file:
        file.attrs["format"] = "mpipipe-tokens"
    assert "tokens.h5: OUT: holds something else" in error_of(capsys, "schedule", "convert", path, "tokens.h5")
    with open("wrong.csv", "w") as file:
        file.write("0B0,0F0\n")
    assert "is not legal" in error_of(capsys, "schedule", "convert", "wrong.csv", "b.json")
    assert main(["schedule", "convert", "wrong.csv", "b.csv"]) == 0


@pytest.mark.parametrize("ending", ["csv", "h5"])
def test_show_takes_a_file(capsys, path, ending):
    if ending == "h5":
        save_table(TABLE, "table.h5")
    assert main(["schedule", "show", f"table.{ending}"]) == 0
    shown = capsys.readouterr().out
    assert main(["schedule", "show", "interleaved", "-p", "2", "-v", "2", "-m", "4"]) == 0
    assert capsys.readouterr().out == shown
    assert main(["schedule", "show", f"./table.{ending}", "-p", "2", "-v", "2", "-m", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == TABLE.rows()


@pytest.mark.parametrize(("option", "has"), [("-p", 2), ("-v", 2), ("-m", 4)])
def test_numbers_that_are_not_those_of_the_file(capsys, path, option, has):
    said = error_of(capsys, "schedule", "show", path, option, "3")
    assert said == f"error: {option}: 3 was asked for, the table of table.csv has {has} (allowed: {has})\n"


def test_a_name_is_a_name_even_if_a_file_is_called_so(capsys, path):
    with open("1f1b", "w") as file:
        file.write("0F0,0B0\n")
    assert main(["schedule", "show", "1f1b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["p"] == 4
    assert main(["schedule", "show", "./1f1b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["p"] == 1
    assert "no.csv: there is no such file" in error_of(capsys, "schedule", "show", "no.csv")


def test_show_writes_the_new_formats(capsys, path):
    numbers = ["-p", "2", "-v", "2", "-m", "4"]
    assert main(["schedule", "show", "interleaved", *numbers, "-o", "b.h5"]) == 0
    assert capsys.readouterr().out == "b.h5\n"
    assert load_table("b.h5") == TABLE
    assert "-o: HDF5 needs a file" in error_of(capsys, "schedule", "show", path, "--format", "h5")
    assert main(["schedule", "show", "interleaved", *numbers, "--format", "chrome"]) == 0
    assert json.loads(capsys.readouterr().out)["otherData"]["schedule"] == "interleaved"
    assert main(["schedule", "show", path, "--format", "torch-comms-csv"]) == 0
    assert capsys.readouterr().out.startswith("0F0,0SEND_F0,")
