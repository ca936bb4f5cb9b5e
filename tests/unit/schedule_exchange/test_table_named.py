"""``pipeline.schedule``: a family with options, or the file of a table that fits the run."""

from __future__ import annotations

import pytest

from mpipipe.errors import ScheduleError
from mpipipe.schedule import ScheduleTable, build, lower
from mpipipe.schedule.exchange import is_file, save_table, table_named


def test_a_family_with_options():
    assert table_named("1f1b:warmup=1", p=2, v=1, m=3) == build("1f1b:warmup=1", p=2, m=3)
    assert not is_file("1f1b")
    assert not is_file("zb-x")


def test_a_file_with_messages_is_taken_without_them(tmp_path, monkeypatch):
    table = build("zb-v", p=2, m=4)
    save_table(lower(table), tmp_path / "own.csv")
    assert table_named(str(tmp_path / "own.csv"), p=2, v=2, m=4) == table
    monkeypatch.chdir(tmp_path)
    assert table_named("own.csv", p=2, v=2, m=4) == table
    assert is_file("own.csv")


@pytest.mark.parametrize("numbers, key", [
    ({"p": 4, "v": 2, "m": 4}, "pipeline.ranks is 4"), ({"p": 2, "v": 1, "m": 4}, "pipeline.chunks is 1"),
    ({"p": 2, "v": 2, "m": 8}, "batch.microbatch, is 8"),
])  # fmt: skip
def test_a_file_for_other_numbers_is_refused(tmp_path, numbers, key):
    path = tmp_path / "own.h5"
    save_table(build("zb-v", p=2, m=4), path)
    with pytest.raises(ScheduleError, match=key) as caught:
        table_named(str(path), **numbers)
    assert "p = 2 ranks, v = 2 chunks a rank and m = 4 microbatches" in str(caught.value)


def test_a_table_that_is_not_legal_is_refused(tmp_path):
    path = tmp_path / "own.csv"
    save_table(ScheduleTable.from_rows([["0F0", "0B0"], ["1B0", "1F0"]]), path)
    with pytest.raises(ScheduleError, match="comes before 1F0") as caught:
        table_named(str(path), p=2, v=1, m=1)
    assert "schedule check" in caught.value.__notes__[0]
    with pytest.raises(ScheduleError, match="no such file"):
        table_named("no/such.csv", p=2, v=1, m=1)
