"""The simulator against tests/data/schedules.csv: figures computed by another program from the papers' rules."""

import csv
from pathlib import Path

import pytest

from mpipipe.schedule import Costs, build, simulate

ROWS = list(csv.DictReader((Path(__file__).parents[2] / "data" / "schedules.csv").read_text().splitlines()))


def test_the_file_holds_198_cases_of_eleven_families():
    assert len(ROWS) == 198
    named = "naive gpipe 1f1b eager-1f1b interleaved looped-bfs zb-h1 zb-h2 interleaved-zb zb-v dualpipe-v"
    assert {row["schedule"] for row in ROWS} == set(named.split())
    assert sum(float(row["latency"]) > 0 for row in ROWS) == 18


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row.values()).replace(" ", ","))
def test_figures(row):
    table = build(row["schedule"], p=int(row["p"]), v=int(row["v"]), m=int(row["m"]))
    costs = Costs(F=float(row["F"]), I=float(row["I"]), W=float(row["W"]))
    found = simulate(table, costs, latency=float(row["latency"]))
    assert found.makespan == float(row["makespan"])
    assert found.busy.max() == float(row["max_busy"])
    assert found.span.max() == float(row["max_span"])
    assert found.peak_activations.tolist() == [int(peak) for peak in row["peak_activations"].split()]
    assert found.messages == int(row["messages"])
