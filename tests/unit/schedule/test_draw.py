"""Text and PNG pictures, and the colours of all."""

import itertools
import re
import tracemalloc

import numpy as np
import pytest

from mpipipe.errors import ScheduleError
from mpipipe.schedule import Costs, ScheduleTable, build, draw_png, draw_text, lower, names, simulate
from mpipipe.schedule.action import Kind
from mpipipe.schedule.draw.colours import PHASE_COLOURS, STYLES, shade
from mpipipe.schedule.draw.scene import compose


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


PLAIN = re.compile("\x1b\\[[0-9;]*m")


@pytest.mark.parametrize("name,p,m", [*((name, 4, 8) for name in names()), ("1f1b", 70, 900), ("dualpipe-v", 8, 120)])
def test_colours_only_colour(name, p, m):
    table = build(name, p=p, m=m)
    plain, coloured = draw_text(table), draw_text(table, colour=True)
    assert "\x1b" not in plain
    lines = PLAIN.sub("", coloured).splitlines()
    assert lines[:-1] == plain.splitlines()
    assert lines[-1].endswith("warm-up  steady  cool-down")
    assert lines[-1].startswith("F forward")


def test_colours_by_kind_and_phase():
    table = ScheduleTable.from_rows([words("0F0 0F1 (0F2;0B0)OVERLAP_F_B 0I1 0W1 0B2")])
    assert draw_text(table, colour=True).splitlines()[0] == (
        "rank 0 | \x1b[36mF0\x1b[0m \x1b[36mF1\x1b[0m \x1b[36;7mF2\x1b[0m\x1b[35;7m&B0---\x1b[0m "
        "\x1b[33;4mI1\x1b[0m \x1b[32;4mW1\x1b[0m \x1b[35;4mB2---\x1b[0m"
    )


@pytest.mark.parametrize(
    "name,p,v,m", [("1f1b", 4, 1, 8), ("interleaved", 8, 2, 16), ("dualpipe", 4, 1, 8), ("gpipe", 1, 1, 1)]
)
def test_png(tmp_path, name, p, v, m):
    pytest.importorskip("matplotlib")
    table = build(name, p=p, v=v, m=m)
    draw_png(table, simulate(table), tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    scene = compose(table, simulate(table))
    assert [int.from_bytes(data[at : at + 4], "big") for at in (16, 20)] == [1.5 * scene.width, 1.5 * scene.height]
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
    assert brightness[0] > sum(shade(Kind.F, 0, 1)) > brightness[3]


def test_png_takes_any_name(tmp_path):
    pytest.importorskip("matplotlib")
    table = ScheduleTable.from_rows([["0F0", "0B0"]], name="$\\frac{$ \x00 <b>")
    draw_png(table, simulate(table), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# How colours look without one kind of cone, in linear light (Machado, Oliveira and Fernandes 2009, severity 1).
CONES = {
    "all": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour, cones="all"):
    """CIE L*, a*, b* of a colour (red, green, blue, each 0..1)."""
    given = np.asarray(colour)
    linear = np.where(given <= 0.04045, given / 12.92, ((given + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(CONES[cones]) @ linear, 0, 1)
    x, y, z = np.cbrt(XYZ @ seen / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("v", [1, 2, 4])
def test_kinds_differ_in_a_grey_print_and_for_the_colour_blind(v):
    shades = {kind: [shade(kind, chunk, v) for chunk in range(v)] for kind in STYLES}
    for one, other in itertools.combinations(STYLES, 2):
        for a, b in itertools.product(shades[one], shades[other]):
            assert abs(lab(a)[0] - lab(b)[0]) > 6, (one, other)
            for cones in CONES:
                assert np.linalg.norm(lab(a, cones) - lab(b, cones)) > 15, (one, other, cones)
    for kind, style in STYLES.items():
        ink = (0, 0, 0) if style.ink == "#000000" else (1, 1, 1)
        assert all(abs(lab(one)[0] - lab(ink)[0]) > 45 for one in shades[kind])


def test_phases_differ_in_lightness():
    tones = [lab([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])[0] for colour in PHASE_COLOURS.values()]
    assert np.all(np.diff(tones) < -20)


def test_only_what_is_drawn_is_made():
    """A time axis of 200 million columns: the first 2000 characters, at once."""
    table = build("1f1b", p=4, m=8)
    simulation = simulate(table, Costs(F=1e-7))
    tracemalloc.start()
    lines = draw_text(table, simulation).splitlines()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert lines[0].startswith("rank 0 | F0 F1 F2 F3 .  .  ")
    assert lines[3].startswith("rank 3 | .  .  .  F0 B0-----")
    assert all(len(line) == 2009 and line.endswith(" ...") for line in lines)
    assert peak < 2_000_000
