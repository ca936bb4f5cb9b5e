"""Text and PNG pictures."""

import pytest

from mpipipe.errors import ScheduleError
from mpipipe.schedule import Costs, ScheduleTable, build, draw_png, draw_text, lower, simulate
from mpipipe.schedule.action import Kind
from mpipipe.schedule.draw.png import shade


def words(text):
    return text.split()


def test_four_ranks_eight_microbatches_fit_in_120_columns():
    for name in ("gpipe", "1f1b"):
        text = draw_text(build(name, p=4, m=8))
        assert max(len(line) for line in text.splitlines()) <= 120
        assert len(text.splitlines()) == 4


def test_one_column_is_the_largest_common_time():
    table = build("1f1b", p=2, m=2)
    assert draw_text(table, simulate(table, Costs(2, 2, 2))) == draw_text(table)
    assert draw_text(table, simulate(table, Costs(1, 1, 1), latency=1)).splitlines() == [
        "rank 0 | F0 F1 .  .  .  .  B0--- .  B1---",
        "rank 1 | .  .  F0 B0--- F1 B1--- .  .  .",
    ]


def test_fractional_times_are_rounded_to_the_shortest_action():
    table = build("1f1b", p=2, m=1)
    assert draw_text(table, simulate(table, Costs(0.5, 0.5, 0.5))).splitlines() == [
        "rank 0 | F0 .  .  .  B0---",
        "rank 1 | .  F0 B0--- .  .",
    ]


def test_wide_numbers_widen_the_cells():
    text = draw_text(build("gpipe", p=2, m=12)).splitlines()
    assert text[0].startswith("rank 0 | F0  F1  F2 ")
    assert "F10 F11 " in text[0]


def test_split_backwards_and_more_stages_than_ranks():
    table = ScheduleTable.from_rows([words("0F0 3F0 3I0 3W0 0B0"), words("1F0 2F0 2B0 1B0")])
    assert str(table).splitlines() == [
        "rank 0 | 0F0 .   .   3F0 3I0 3W0 .   .   .   0B0----",
        "rank 1 | .   1F0 2F0 .   .   2B0---- 1B0---- .   .",
    ]


def test_large_tables_are_cut_with_a_note():
    lines = draw_text(build("1f1b", p=70, m=900)).splitlines()
    assert len(lines) == 65
    assert lines[-1] == "(6 more ranks)"
    assert max(len(line) for line in lines) <= 2000 + len("rank 00 | ")
    assert lines[0].endswith(" ...")


def test_text_of_what_has_no_times():
    assert str(lower(build("gpipe", p=2, m=1))).splitlines() == [
        "rank 0 | 0F0      0SEND_F0 0RECV_B0 0B0",
        "rank 1 | 1RECV_F0 1F0      1B0      1SEND_B0",
    ]
    illegal = ScheduleTable.from_rows([["0B0", "0F0"]])
    assert str(illegal) == "rank 0 | 0B0 0F0"
    with pytest.raises(ScheduleError):
        draw_text(illegal)


@pytest.mark.parametrize("name,p,v,m", [("1f1b", 4, 1, 8), ("interleaved", 8, 2, 16), ("gpipe", 1, 1, 1)])
def test_png(tmp_path, name, p, v, m):
    pytest.importorskip("matplotlib")
    table = build(name, p=p, v=v, m=m)
    draw_png(table, simulate(table), tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20], "big") == 1690
    assert len(data) > 5000


def test_png_refuses_what_nobody_could_read(tmp_path):
    table = build("gpipe", p=64, m=1000)
    with pytest.raises(ScheduleError, match="too large for a picture"):
        draw_png(table, simulate(table), tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_shades_darken_with_the_chunk():
    brightness = [sum(shade(Kind.F, chunk, 4)) for chunk in range(4)]
    assert brightness == sorted(brightness, reverse=True)
    assert len(set(brightness)) == 4
    assert shade(Kind.B, 0, 1) == shade(Kind.B, 3, 4)
