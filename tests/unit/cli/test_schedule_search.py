"""``schedule search``: its figures, its file, its refusals."""

import json

import pytest
from typer.testing import CliRunner

from mpipipe.cli.schedule import app
from mpipipe.cli.schedule_costs import read_costs
from mpipipe.cli.schedule_search import parse_memory
from mpipipe.errors import ConfigError
from mpipipe.schedule import Costs, build, simulate, verify
from mpipipe.schedule.exchange import load_table


def search(*arguments):
    return CliRunner().invoke(app, ["search", *arguments])


def test_text():
    result = search("-p", "4", "-m", "8", "--memory", "4", "--top", "2")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["found", "by", "makespan", "over", "the", "bound", "peak"]
    assert lines[1].split() == ["zb-h1", "27", "0.0", "%", "4"]
    assert lines[3:] == [
        "best: zb-h1",
        "makespan 27  gap 0.0 % (no table on the loop placement is shorter)  bubble fraction 0.111",
        "activations kept at once, by rank: 4 4 4 4",
    ]


def test_json_and_file(tmp_path):
    file = tmp_path / "found.csv"
    arguments = ("-p", "3", "-m", "5", "-v", "2", "--memory", "4,3,3", "--cost", "F=2,I=3,W=1", "--latency", "1")
    result = search(*arguments, "--effort", "0", "--json", "-o", str(file))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    table = load_table(file)
    verify(table)
    assert table.rows() == found["rows"]
    simulation = simulate(table, Costs(2, 3, 1), 1)
    assert simulation.makespan == found["makespan"]
    assert all(kept <= cap for kept, cap in zip(found["peak_activations"], (4, 3, 3), strict=True))
    assert found["gap"] == pytest.approx(found["makespan"] / found["lower_bound"] - 1)
    assert {"name", "makespan", "peak", "reason"} == set(found["tried"][0])
    assert found["ordered"] is True


def test_costs_of_a_file(tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"F": [2, 1, 1], "I": 1, "W": [1, 1, 2.5]}))
    assert read_costs(file) == Costs([2, 1, 1], 1, [1, 1, 2.5])
    assert search("-p", "3", "-m", "4", "--costs", str(file)).exit_code == 0
    shown = CliRunner().invoke(app, ["show", "1f1b", "--cost", "F=2", "--json"])
    file.write_text(shown.stdout)
    assert read_costs(file) == Costs(2, 1, 1)


@pytest.mark.parametrize("text", ["", "[1]", '{"F": 1}', '{"F": 1, "I": 1, "W": -1}', '{"F": "1", "I": 1, "W": 1}'])
def test_costs_that_are_none(tmp_path, text):
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="--costs"):
        read_costs(file)
    with pytest.raises(ConfigError, match="can't be read"):
        read_costs(tmp_path / "none")


def test_memory():
    assert parse_memory("") is None
    assert parse_memory("8") == 8
    assert parse_memory("8, 7,6") == [8, 7, 6]
    for text in ("0", "-1", "x", "8,", "1.5"):
        with pytest.raises(ConfigError, match="--memory"):
            parse_memory(text)


def test_an_ending_that_is_no_table():
    result = search("-p", "2", "-m", "2", "-o", "found.png")
    assert isinstance(result.exception, ConfigError)
    assert "saved as CSV or HDF5" in str(result.exception)


def test_no_split():
    found = json.loads(search("-p", "4", "-m", "8", "--no-split", "--json").stdout)
    assert found["rows"] == build("1f1b", p=4, m=8).rows()
