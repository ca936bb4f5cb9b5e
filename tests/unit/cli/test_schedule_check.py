"""``mpipipe schedule check`` and ``compare``: verdicts, places in files, exit codes, figures side by side."""

from __future__ import annotations

import json

import pytest

from mpipipe.cli import main
from mpipipe.schedule import build, figures, lower, names, simulate
from mpipipe.schedule.exchange import save_table


def json_of(capsys, *arguments, code=0):
    assert main(["schedule", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def table_file(tmp_path):
    path = tmp_path / "table.csv"
    save_table(build("1f1b", p=2, m=4), path)
    return path


def test_a_legal_table_has_the_figures_of_show(capsys, table_file):
    table = build("1f1b", p=2, m=4)
    found = json_of(capsys, "check", str(table_file))
    assert (found["ok"], found["problems"], found["receive_buffers"]) == (True, [], 1)
    assert {key: found[key] for key in figures(table, simulate(table))} == figures(table, simulate(table))
    assert main(["schedule", "check", str(table_file)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{table_file}: ok with buffered sends (needs 1 receive buffer a rank if sends wait): p=2 ")
    assert "makespan 15 (no less than 15)" in text


def test_a_problem_names_line_and_cell(capsys, table_file):
    text = table_file.read_text()
    table_file.write_text(text.replace("1F0,1B0,1F1", "1F1,1B0,1F0"))
    line = 1 + text[: text.index("1F0,1B0,1F1")].count("\n")
    found = json_of(capsys, "check", str(table_file), code=2)
    assert found["ok"] is False
    assert found["makespan"] is found["rows"] is found["receive_buffers"] is None
    first = found["problems"][0]
    assert (first["rank"], first["row"], first["action"], first["kind"]) == (1, 1, "1B0", "order")
    assert (first["line"], first["cell"]) == (line, 2)
    assert main(["schedule", "check", str(table_file)]) == 2
    text = capsys.readouterr().out
    assert text.startswith(f"{table_file}:{line}, cell 2: rank 1, row 1, 1B0: comes before 1F0, which it needs\n")
    assert "[1B0]" in text


def test_many_problems_are_counted(capsys, tmp_path):
    path = tmp_path / "short.csv"
    path.write_text("0F0\n1F49,1B49\n")
    assert main(["schedule", "check", str(path)]) == 2
    text = capsys.readouterr().out
    assert "more (--json has all)" in text
    assert len(json_of(capsys, "check", str(path), code=2)["problems"]) > 100


def test_sends_that_wait(capsys, table_file):
    found = json_of(capsys, "check", str(table_file), "--sends", "rendezvous", code=2)
    (problem,) = found["problems"]
    assert problem["kind"] == "deadlock"
    assert problem["message"].startswith("deadlock with rendezvous sends: rank 0 at 0SEND_F1 waits for 1RECV_F1")
    assert json_of(capsys, "check", str(table_file), "--receive-buffers", "1")["ok"] is True
    error = json_of(capsys, "check", str(table_file), "--sends", "rendezvous", "--receive-buffers", "1", code=2)
    assert "rendezvous sends have no receive buffers" in error["error"]["message"]


def test_too_few_receive_buffers(capsys, tmp_path):
    table = build("interleaved", p=4, v=2, m=8)
    save_table(lower(table), tmp_path / "table.h5")
    needed = json_of(capsys, "check", str(tmp_path / "table.h5"))["receive_buffers"]
    assert needed > 1
    less = str(needed - 1)
    (problem,) = json_of(capsys, "check", str(tmp_path / "table.h5"), "--receive-buffers", less, code=2)["problems"]
    assert problem["kind"] == "deadlock"
    assert (problem["line"], problem["cell"]) == (None, None)


@pytest.mark.parametrize("content", [None, "", "0F0,2X1\n", "0F0\x00\n", "# format = mpipipe-schedule\n"])
def test_what_is_no_table_is_one_error(capsys, tmp_path, content):
    path = tmp_path / "no.csv"
    if content is not None:
        path.write_text(content)
    error = json_of(capsys, "check", str(path), code=2)["error"]
    assert str(path) in error["message"]
    assert main(["schedule", "check", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {path}")


def test_compare_has_the_figures_of_show(capsys, table_file):
    found = json_of(capsys, "compare", "1f1b", "zb-h1", str(table_file), "zb-v", "-p", "2", "-m", "4")["schedules"]
    assert [one["schedule"] for one in found] == ["1f1b", "zb-h1", str(table_file), "zb-v"]
    for one, name, v in zip(found, ("1f1b", "zb-h1", "1f1b", "zb-v"), (1, 1, 1, 2), strict=True):
        table = build(name, p=2, m=4, v=v)
        whole = figures(table, simulate(table))
        assert {key: one[key] for key in whole if key not in ("rows", "schedule")} == {
            key: whole[key] for key in whole if key not in ("rows", "schedule")
        }
        assert one["time_over_work"] == pytest.approx(one["makespan"] / max(one["busy"]))


def test_compare_prints_a_line_each_and_why_one_is_missing(capsys):
    assert main(["schedule", "compare", "all", "-p", "4", "-m", "3", "--latency", "0.5", "--cost", "F=1,I=2,W=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = [name for name in names() if any(line.startswith((f"{name} ", f"{name}:")) for line in lines)]
    assert told == list(names())
    assert any(line.startswith("dualpipe: ") and "pipeline.ranks" in line for line in lines)
    ratios = [float(line.split()[4]) for line in lines[1:] if ": " not in line]
    assert ratios == sorted(ratios)
    assert json_of(capsys, "compare", "zb-x", code=2)["error"]["type"] == "ScheduleError"
    assert json_of(capsys, "compare", "dualpipe", "-m", "3", code=2)["error"]["type"] == "ScheduleError"


def test_costs_of_a_file_and_of_pairs(capsys, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"F": [1, 1, 1, 1], "I": 1, "W": [1, 1, 1, 2], "FB": 2.5}))
    pairs = ("dualpipe-v", "-p", "2", "-m", "4")
    error = json_of(capsys, "show", *pairs, "--costs", str(path), code=2)["error"]
    assert "costs FB = 2.5: two actions at once take no less" in error["message"]
    path.write_text(json.dumps({"F": 1, "I": 1, "W": 1, "FB": 2}))
    found = json_of(capsys, "show", *pairs, "--costs", str(path))
    assert found["costs"] == {"F": 1, "I": 1, "W": 1, "FB": 2}
    assert found["makespan"] == json_of(capsys, "show", *pairs, "--cost", "FB=2")["makespan"]
    assert found["makespan"] < json_of(capsys, "show", *pairs)["makespan"]
    (one,) = json_of(capsys, "compare", *pairs, "--costs", str(path))["schedules"]
    assert one["makespan"] == found["makespan"]
    error = json_of(capsys, "show", "1f1b", "--cost", "F=2", "--costs", str(path), code=2)["error"]
    assert "exclude each other" in error["message"]
