"""docs/schedules.md shows what the code draws."""

import re
from pathlib import Path

import pytest

from mpipipe.schedule import build, draw_text, find_problems, names
from mpipipe.schedule.table import ScheduleTable

PAGE = (Path(__file__).parents[3] / "docs" / "schedules.md").read_text()


@pytest.mark.parametrize("name", names())
def test_pictures(name):
    match = re.search(rf"`{name}`, p = (\d+),(?: v = (\d+),)? m = (\d+):\n\n```\n(.*?)```", PAGE, re.DOTALL)
    p, v, m = (int(number or 1) for number in match.groups()[:3])
    assert draw_text(build(name, p=p, v=v, m=m)).splitlines() == match[4].splitlines()


def test_the_deadlock_message():
    (problem,) = find_problems(ScheduleTable.from_rows([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]]))
    assert problem.message in PAGE
