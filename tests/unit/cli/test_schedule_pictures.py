"""``schedule show`` as SVG, HTML and coloured text."""

import json
import re
import sys
import xml.etree.ElementTree as ET

import pytest

from mpipipe.cli import main
from mpipipe.cli.schedule_pictures import wants_colour
from mpipipe.schedule import build
from mpipipe.schedule.exchange import save_table

SHOW = ("schedule", "show", "1f1b", "-p", "2", "-m", "3")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def page_data(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*)</script>', text)[1])["schedules"]


def shown(capsys, *arguments):
    assert main([*arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["a.svg", "a.SVG", "a.html", "a.htm"])
def test_the_ending_chooses_the_picture(capsys, tmp_path, name):
    assert shown(capsys, *SHOW, "-o", name) == f"{name}\n"
    text = (tmp_path / name).read_text(encoding="utf-8")
    assert text.startswith("<svg" if "svg" in name.lower() else "<!DOCTYPE html>")
    assert shown(capsys, *SHOW, "--format", "svg" if "svg" in name.lower() else "html") == text
    assert shown(capsys, *SHOW, "-o", name) == f"{name}\n"


def test_svg_of_the_costs_asked_for(capsys):
    root = ET.fromstring(shown(capsys, *SHOW, "--format", "svg", "--cost", "F=2", "--latency", "1"))
    assert any("F = 2, I = 1, W = 1, latency 1" in (one.text or "") for one in root.iter())


def test_what_is_something_else_is_kept(capsys, tmp_path):
    (tmp_path / "a.svg").write_text("my notes")
    assert main([*SHOW, "-o", "a.svg"]) == 2
    assert "is kept" in capsys.readouterr().err
    assert (tmp_path / "a.svg").read_text() == "my notes"


def test_two_schedules_on_a_page(capsys):
    one, other = page_data(shown(capsys, *SHOW, "--format", "html", "--against", "gpipe"))
    assert (one["name"], other["name"]) == ("1f1b", "gpipe")
    assert (one["p"], one["m"]) == (other["p"], other["m"]) == (2, 3)
    assert one["note"] == other["note"] == ""


def test_the_second_has_a_model_as_large_as_the_first(capsys):
    one, other = page_data(shown(capsys, "schedule", "show", "zb-v", "--format", "html", "--against", "1f1b"))
    assert other["note"] == "a chunk is 2 of one above"
    assert one["makespan"] * one["tick"] == 51
    assert other["makespan"] * other["tick"] == 66
    one, other = page_data(
        shown(capsys, "schedule", "show", "interleaved", "-v", "4", "--format", "html", "--against", "interleaved-zb")
    )
    assert len(set(one["stage"])) == len(set(other["stage"])) == 16
    assert other["note"] == ""


def test_a_file_can_be_the_second(capsys, tmp_path):
    save_table(build("gpipe", p=3, m=5), tmp_path / "mine.csv")
    one, other = page_data(shown(capsys, *SHOW, "--format", "html", "--against", "mine.csv"))
    assert (one["p"], other["p"], other["m"]) == (2, 3, 5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--against", "gpipe"], "--against"),
        (["--against", "gpipe", "-o", "a.svg"], "html form only"),
        (["--against", "gpipee", "--format", "html"], "did you mean 'gpipe'"),
        (["--against", "no.csv", "--format", "html"], "no.csv"),
        (["-p", "64", "-m", "2000", "-o", "a.html"], "256000 actions"),
        (["-p", "64", "-m", "2000", "-o", "a.svg"], "too large for a picture"),
    ],
)
def test_refusals(capsys, tmp_path, arguments, said):
    assert main([*SHOW, *arguments]) == 2
    found = capsys.readouterr()
    assert said in found.err
    assert found.out == ""
    assert not list(tmp_path.glob("a.*"))


def test_colours_when_asked_for(capsys, tmp_path):
    plain, coloured = shown(capsys, *SHOW), shown(capsys, *SHOW, "--colour", "always")
    assert "\x1b" not in plain
    assert "\x1b[36mF0\x1b[0m" in coloured
    assert coloured.endswith(plain.partition("\n")[2].partition("\n")[2])
    assert shown(capsys, *SHOW, "--color", "never") == plain
    shown(capsys, *SHOW, "--colour", "always", "-o", "a.txt")
    assert (tmp_path / "a.txt").read_text() == coloured


def test_colours_by_themselves_on_a_terminal_only(monkeypatch, tmp_path):
    assert not wants_colour("auto", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert wants_colour("auto", None)
    assert not wants_colour("auto", tmp_path / "a.txt")
    assert not wants_colour("never", None)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colour("auto", None)
    assert wants_colour("always", None)
    monkeypatch.setenv("NO_COLOR", "")
    assert wants_colour("auto", None)
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_colour("auto", None)
