"""What ``-o`` replaces and what it keeps, what ``--json`` prints beside a file, and how large a table may be."""

import json
import os
import subprocess
import sys
import threading

import pytest

from mpipipe.cli import main
from mpipipe.schedule import build
from mpipipe.schedule.exchange import load_table, save_table

SHOW = ["schedule", "show", "1f1b", "-p", "2", "-m", "3"]
MINE = {
    "png": b"\x89PNG\r\n\x1a\n and a photograph",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><circle r="1"/></svg>',
    "html": b"<!DOCTYPE html>\n<title>my home page</title>",
    "txt": b"what I must not forget",
    "json": b'{"name": "my package"}',
}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def refused(capsys, *arguments):
    assert main(list(arguments)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


@pytest.mark.parametrize("ending", MINE)
def test_what_mpipipe_did_not_make_is_kept(capsys, tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    path.write_bytes(MINE[ending])
    said = refused(capsys, *SHOW, "-o", path.name)
    assert "that mpipipe made, and is kept: choose another name, or remove it" in said
    assert path.read_bytes() == MINE[ending]


@pytest.mark.parametrize("ending", MINE)
def test_an_empty_file_and_our_own_are_replaced(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    path.touch()
    assert main([*SHOW, "-o", path.name]) == 0
    first = path.read_bytes()
    assert main([*SHOW, "-m", "4", "-o", path.name]) == 0
    assert path.read_bytes() != first
    assert os.listdir(tmp_path) == [path.name]


def test_figures_and_timelines_do_not_replace_each_other(capsys):
    for form, other in (("json", "chrome"), ("chrome", "json")):
        for _ in range(2):
            assert main([*SHOW, "--format", form, "-o", f"{form}.json"]) == 0
        capsys.readouterr()
        assert "is kept" in refused(capsys, *SHOW, "--format", other, "-o", f"{form}.json")


def test_a_failed_write_leaves_the_old_file(capsys, tmp_path, monkeypatch):
    assert main([*SHOW, "-o", "a.txt"]) == 0
    before = (tmp_path / "a.txt").read_text()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mpipipe.schedule.exchange.files.sync", full)
    capsys.readouterr()
    assert "No space left on device" in refused(capsys, *SHOW, "-m", "4", "-o", "a.txt")
    assert (tmp_path / "a.txt").read_text() == before
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_pipe_takes_a_picture(tmp_path):
    os.mkfifo("pipe")
    got = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    assert main([*SHOW, "--format", "png", "-o", "pipe"]) == 0
    reader.join()
    assert got[0].startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("name", ["a.csv", "a.h5", "a.json", "a.svg", "a.png", "a.txt"])
def test_json_beside_a_file_is_one_object(capsys, tmp_path, name):
    assert main([*SHOW, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert main([*SHOW, "--json", "-o", name]) == 0
    assert json.loads(capsys.readouterr().out) == {"written": name} | figures
    assert (tmp_path / name).stat().st_size


def test_json_of_convert_and_search(capsys):
    save_table(build("1f1b", p=2, m=3), "a.csv")
    assert main(["schedule", "convert", "a.csv", "b.h5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "written": "b.h5", "format": "h5", "schedule": "1f1b", "p": 2, "v": 1, "m": 3, "lowered": False, "actions": 12,
    }  # fmt: skip
    assert main(["schedule", "search", "-p", "2", "-m", "2", "--json", "-o", "c.csv"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["written"], found["placements"]) == ("c.csv", ["loop"])
    assert load_table("c.csv").rows() == found["rows"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "1f1b", "-p", "1000", "-m", "100000"], "200,000,000 actions takes minutes and gigabytes as text"),
        (["show", "1f1b", "-p", "100", "-m", "100000", "--format", "json"], "as json, at most 5,000,000"),
        (["show", "1f1b", "-p", "1000", "-m", "100000", "-o", "a.svg"], "as svg"),
        (["compare", "gpipe", "1f1b", "-p", "1000", "-m", "100000"], "to compare, at most 20,000,000"),
        (["show", "1f1b", "-p", "4000", "-m", "1000000", "-o", "a.h5"], "at most 200,000,000: take m = 16666"),
        (["show", "1f1b", "-o", ""], "-o: '.' is a folder"),
        (["show", "1f1b", "-o", "a.odd"], ".html"),
        (["convert", "t.csv", ""], "OUT: '.' is a folder"),
        (["convert", "t.csv", "a.odd"], "(allowed: .csv, .json, .h5, .hdf5)"),
        (["convert", "t.csv", "a.csv", "--latency", "-1"], "latency = -1.0"),
        (["convert", "t.csv", "a.csv", "--costs", "three.json"], "costs F: found 3 numbers"),
        (["show", "1f1b", "--cost", "F=1_0"], "'F=1_0' is no cost"),
        (["show", "1f1b", "--cost", "F=\u0663"], "is no cost"),
        (["show", "1f1b", "--cost", "F=nan"], "is no cost"),
        (["show", "1f1b", "--cost", "F=1,F=2"], "'F=2' stands twice"),
        (["show", "1f1b", "--cost", "F=1e308"], "costs F = 1e+308"),
        (["show", "1f1b", "--latency", "1e308"], "latency = 1e+308"),
        (["search", "--latency", "1e308"], "latency = 1e+308"),
        (["show", "1f1b", "--costs", "twice.json"], "the key 'F' stands twice"),
        (["show", "1f1b", "--costs", "long.json"], "F must be a number"),
        (["show", "1f1b", "--costs", "longer.json"], "holds no costs as JSON"),
        (["search", "--memory", "x"], "--memory: 'x' is no cap"),
        (["search", "--memory", "9" * 5000], "9999' is no cap"),
        (["search", "--memory", "\u0663"], "is no cap"),
    ],
)
def test_refusals(capsys, tmp_path, arguments, said):
    save_table(build("1f1b", p=2, m=3), "t.csv")
    files = {"three": '{"F": [1, 2, 3], "I": 1, "W": 1}', "twice": '{"F": 1, "F": 2, "I": 1, "W": 1}'}
    files |= {"long": '{"F": %s, "I": 1, "W": 1}' % ("9" * 400), "longer": '{"F": %s}' % ("9" * 5000)}
    for name, text in files.items():
        (tmp_path / f"{name}.json").write_text(text)
    before = sorted(os.listdir())
    assert said in refused(capsys, "schedule", *arguments)
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("text", ["F=1", "F=.5", "F=2.", "F=1e-3", "F=1.5E+2", "F = 2 , I=3"])
def test_costs_that_are_numbers(capsys, text):
    assert main([*SHOW, "--cost", text]) == 0


def test_a_word_for_costs_of_nothing_and_for_no_backward(capsys, tmp_path):
    assert main([*SHOW, "--cost", "F=0,I=0,W=0"]) == 0
    assert capsys.readouterr().out.endswith("all costs are 0: nothing takes time, so that there is nothing to draw\n")
    (tmp_path / "forward.csv").write_text("0F0,0F1\n1F0,1F1\n")
    assert main(["schedule", "check", "forward.csv"]) == 0
    assert "4 actions, no backward, as for an evaluation\n" in capsys.readouterr().out


def test_a_table_with_an_action_twice_on_two_ranks(capsys, tmp_path):
    (tmp_path / "z.csv").write_text("0F0,0B0,1B0\n1F0,1B0\n2F0,2B0\n")
    assert main(["schedule", "check", "z.csv", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert {one["kind"] for one in found["problems"]} >= {"owner", "duplicate"}


@pytest.mark.parametrize(("arguments", "code"), [(["show", "1f1b"], 0), (["check", "no.csv"], 2)])
def test_a_closed_standard_output(arguments, code):
    """As ``mpipipe ... >&-``."""
    command = [sys.executable, "-m", "mpipipe", "schedule", *arguments]
    done = subprocess.run(["/bin/sh", "-c", '"$@" >&-', "sh", *command], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
