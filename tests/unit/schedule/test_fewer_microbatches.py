"""Tables cut down to fewer microbatches stay legal and get no longer."""

import pytest

from mpipipe.errors import ScheduleError
from mpipipe.schedule import build, fewer_microbatches, find_problems, names, simulate


@pytest.mark.parametrize("name", names())
def test_every_family_cut_down(name):
    table = build(name, p=4, m=9 if name != "dualpipe" else 10)
    if table.mirror is not None:
        with pytest.raises(ScheduleError, match="can't be cut down"):
            fewer_microbatches(table, 3)
        return
    for m in (1, 2, 5, 8, table.m):
        less = fewer_microbatches(table, m)
        assert find_problems(less) == []
        assert (less.m, less.placement, less.ordered) == (m, table.placement, True)
        assert simulate(less, latency=0.5).makespan <= simulate(table, latency=0.5).makespan
    assert fewer_microbatches(table, table.m) == table


@pytest.mark.parametrize("m", [0, -1, 9])
def test_numbers_out_of_range(m):
    with pytest.raises(ScheduleError, match="can't be cut down"):
        fewer_microbatches(build("1f1b", p=2, m=8), m)
