"""``advice`` knows every schedule of the registry."""

import pytest

from mpipipe.planner import advice
from mpipipe.schedule import build, names, simulate


@pytest.mark.parametrize("name", names())
def test_few_microbatches(name):
    table = build(name, p=2, m=4)
    (line,) = advice(2, table.v, 4, name)
    assert f"{simulate(table).bubble_fraction:.3f}" in line
    assert advice(1, table.v, 4, name) == []


@pytest.mark.parametrize("name", ["1f1b:warmup=1", "eager-1f1b:per_hop=3", "zb-h1:warmup=1"])
def test_with_options(name):
    (line,) = advice(4, 1, 4, name)
    assert "4 microbatches on 4 ranks are few" in line
