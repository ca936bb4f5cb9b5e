"""The arrays of a table: bad numbers are refused, not wrapped, and nobody can write to them afterwards."""

import numpy as np
import pytest

from mpipipe.errors import ScheduleError
from mpipipe.schedule import ScheduleTable, build

GOOD = {"name": "x", "p": 1, "v": 1, "m": 2, "placement": (0,), "lowered": False, "offsets": [0, 4]}
GOOD |= {"kinds": [0, 0, 1, 1], "stages": [0, 0, 0, 0], "microbatches": [0, 1, 0, 1]}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"stages": [0, 0, 0, 65536]}, "stages holds 65536"),
        ({"stages": [0, 0, 0, -32769]}, "stages holds -32769"),
        ({"kinds": [0, 0, 1, 256]}, "kinds holds 256"),
        ({"kinds": [0, 0, 1, -1]}, "kinds holds -1"),
        ({"microbatches": [0, 1, 0, 2**32]}, "microbatches holds 4294967296"),
        ({"microbatches": [0.0, 1.0, 0.0, 1.5]}, "microbatches must be whole numbers, found float64"),
        ({"microbatches": [False, True, False, True]}, "whole numbers, found bool"),
        ({"stages": ["0", "0", "0", "0"]}, "stages must be whole numbers"),
        ({"stages": [[0, 0], [0]]}, "stages must be one list of whole numbers"),
        ({"stages": [[0, 0, 0, 0]]}, "stages must be one list of whole numbers, found 2 dimensions"),
        ({"microbatches": 3}, "one list"),
        ({"offsets": [0.0, 4.0]}, "offsets must be whole numbers"),
        ({"placement": (0.5,)}, "whole numbers"),
        ({"mirror": ("0",)}, "whole numbers"),
        ({"m": 2.5}, "whole numbers"),
        ({"overlaps": np.array([2**63], dtype=np.uint64)}, "overlaps holds"),
    ],
)
def test_bad_numbers_are_refused(changed, said):
    with pytest.raises(ScheduleError, match=said):
        ScheduleTable(**GOOD | changed)


def test_numbers_that_fit_are_taken_from_any_type():
    expected = ScheduleTable.from_rows([["0F0", "0F1", "0B0", "0B1"]])
    assert ScheduleTable(**GOOD) == expected
    wide = {name: np.array(GOOD[name], dtype=">i8") for name in ("offsets", "kinds", "stages", "microbatches")}
    assert ScheduleTable(**GOOD | wide | {"m": np.int64(2), "placement": np.array([0])}) == expected


def test_nobody_can_write_to_a_table():
    mine = np.zeros(4, dtype=np.int16)
    view = mine[:]
    view.flags.writeable = False
    for given in (mine, view):
        table = ScheduleTable(**GOOD | {"stages": given})
        mine[:] = 1
        assert table.stages.tolist() == [0, 0, 0, 0]
        mine[:] = 0
        with pytest.raises(ValueError, match="read-only"):
            table.stages[0] = 1


def test_read_only_arrays_are_not_copied():
    table = build("1f1b", p=4, m=8)
    fields = {name: getattr(table, name) for name in GOOD}
    again = ScheduleTable(**fields)
    for name in ("offsets", "kinds", "stages", "microbatches"):
        assert getattr(again, name) is getattr(table, name)
    half = table.stages[:8]
    assert np.shares_memory(ScheduleTable(**GOOD | {"kinds": table.kinds[[0] * 4], "stages": half[:4]}).stages, half)
