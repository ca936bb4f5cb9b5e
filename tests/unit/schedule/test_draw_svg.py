"""SVG pictures, read back as XML."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from mpipipe.errors import ScheduleError
from mpipipe.schedule import Costs, ScheduleTable, build, critical_path, memory_curve, names, simulate, svg_text
from mpipipe.schedule.draw.scene import compose, numbered_chunks, ticks

SVG = "{http://www.w3.org/2000/svg}"
CASES = [("1f1b", 4, 8), ("interleaved", 4, 8), ("zb-v", 4, 8), ("dualpipe", 4, 8), ("v-min", 3, 5), ("chimera", 4, 4)]


def group(root, name):
    return next(one for one in root.iter(f"{SVG}g") if one.get("id") == name)


def bars(root):
    """Text of the action -> (x, y, width, height, colour)."""
    found = {}
    for rank in group(root, "actions"):
        for rect in rank:
            about = rect.find(f"{SVG}title").text
            assert rect.get("class") == "a"
            place = tuple(float(rect.get(key)) for key in ("x", "y", "width", "height"))
            assert about not in found
            found[about] = (*place, rank.get("fill"))
    return found


@pytest.mark.parametrize("name,p,m", CASES)
def test_a_bar_an_action_at_its_simulated_time(name, p, m):
    table = build(name, p=p, m=m, v=2 if name == "interleaved" else None)
    simulation = simulate(table, Costs(1, 1.5, 0.5), latency=0.25)
    root = ET.fromstring(svg_text(table, simulation))
    found = bars(root)
    assert len(found) == table.num_actions
    width = float(root.get("width")) - 66 - 52
    by_action = {about.split(",")[0]: (about, place) for about, place in found.items()}
    rank_height = None
    for rank in range(p):
        for index in range(*table.row_of(rank).indices(table.num_actions)):
            about, (x, y, wide, high, _) = by_action[str(table.action(index))]
            assert f", rank {rank}, {simulation.start[index]:g} to {simulation.end[index]:g}, " in about
            assert x == pytest.approx(66 + simulation.start[index] * width / simulation.makespan, abs=0.01)
            lasts = simulation.end[index] - simulation.start[index]
            assert wide == pytest.approx(lasts * width / simulation.makespan, abs=0.01)
            paired = index in table.overlaps or index - 1 in table.overlaps
            rank_height = rank_height or (high * 2 if paired else high)
            assert high == pytest.approx(rank_height / 2 if paired else rank_height, abs=0.011)
            assert y > 68 + rank * rank_height


def test_an_overlapped_pair_is_two_halves_one_on_the_other():
    table = ScheduleTable.from_rows([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]])
    drawn = bars(ET.fromstring(svg_text(table, simulate(table))))
    found = {about.split(",")[0]: place for about, place in drawn.items()}
    forward, backward = found["0F1"], found["0B0"]
    assert forward[0] == backward[0]
    assert forward[2] == backward[2]
    assert forward[1] + forward[3] == backward[1]
    assert backward[1] + backward[3] == found["0F0"][1] + found["0F0"][3]


def test_numbers_are_the_microbatches_where_they_fit():
    table = build("1f1b", p=4, m=8)
    shown = [one.text for one in group(ET.fromstring(svg_text(table, simulate(table))), "numbers").iter(f"{SVG}text")]
    assert sorted(shown) == sorted(str(number) for number in table.microbatches.tolist())
    large = build("1f1b", p=16, m=256)
    assert 'id="numbers"' not in svg_text(large, simulate(large))


def test_title_figures_axis_and_legend():
    table = build("dualpipe", p=4, m=8)
    simulation = simulate(table, latency=1)
    root = ET.fromstring(svg_text(table, simulation))
    words = [one.text for one in group(root, "words").iter(f"{SVG}text")]
    assert words[-1] == "time, in the unit of the costs (F = 1, I = 1, W = 1, latency 1)"
    for word in ("dualpipe · p=4 v=1 m=8", "rank 3", "forward", "weight gradient", "waiting", "cool-down",
                 "critical path"):  # fmt: skip
        assert word in words
    figures = f"makespan {simulation.makespan:g}, bubble fraction {simulation.bubble_fraction:.3f}, lower bound "
    assert any(word.startswith(figures) for word in words if word)
    assert any("second copy" in (word or "") for word in words)
    assert root.find(f"{SVG}title").text.startswith("dualpipe, p=4")


def test_the_critical_path_is_framed_from_start_to_end():
    table = build("1f1b", p=4, m=8)
    simulation = simulate(table)
    scene = compose(table, simulation)
    frames = scene.frames[:-1]  # the last is the legend's
    per_unit = (scene.width - 66 - 52) / simulation.makespan
    assert sum(frame.width for frame in frames) == pytest.approx(simulation.makespan * per_unit)
    assert len(scene.links) == len(frames) - 1
    owners = table.owners()[critical_path(simulation)]
    assert len(scene.links) == np.count_nonzero(np.diff(owners))


def test_memory_curves_are_those_of_the_simulation():
    table = build("zb-v", p=4, m=8)
    simulation = simulate(table)
    scene = compose(table, simulation)
    for rank in range(table.p):
        curve, line = memory_curve(simulation, rank), scene.curves[rank]
        assert len(line.points) == 2 + 2 * len(curve.times)
        floor = line.points[0][1]
        rises = [floor - y for _, y in line.points[2:-1:2]]
        assert np.allclose(np.array(rises) / max(rises), curve.kept / curve.peak)


def test_second_copies_are_marked():
    table = build("dualpipe", p=4, m=8)
    scene = compose(table, simulate(table))
    mirrored = table.microbatches >= table.first_mirrored
    chunks, count = numbered_chunks(table)
    assert count == 2
    assert np.array_equal(chunks == 1, mirrored)
    assert sum(box.width for box in scene.stripes) == pytest.approx(scene.bars[mirrored, 2].sum())
    assert not compose(build("1f1b", p=4, m=8), simulate(build("1f1b", p=4, m=8))).stripes


def test_large_tables_have_a_path_for_each_rank_and_colour():
    table = build("gpipe", p=16, m=700)
    text = svg_text(table, simulate(table))
    assert len(text) < 1_000_000
    paths = group(ET.fromstring(text), "actions").findall(f"{SVG}path")
    assert len(paths) == 32
    assert sum(path.get("d").count("M") for path in paths) == table.num_actions == 22400


def test_what_is_too_large_is_refused_with_what_to_do():
    table = build("gpipe", p=64, m=1000)
    with pytest.raises(ScheduleError, match=r"128000.*at most 100000 actions.*smaller p, v or m"):
        svg_text(table, simulate(table))


@pytest.mark.parametrize(
    "name", ['<script>alert(1)</script> & "x"', "\x00\x1b[31m\ud800\ufffe", "]]>", "$\\frac{$", "é 漢"]
)
def test_names_from_files_do_no_harm(name):
    table = ScheduleTable.from_rows([["0F0", "0B0"]], name=name)
    text = svg_text(table, simulate(table))
    text.encode("utf-8")
    root = ET.fromstring(text)
    assert not list(root.iter(f"{SVG}script"))
    allowed = {"svg", "g", "rect", "path", "text", "title"}
    assert {one.tag.removeprefix(SVG) for one in root.iter()} <= allowed
    if name.isprintable():
        assert root.find(f"{SVG}title").text.startswith(name)


def test_the_same_table_gives_the_same_text():
    texts = {svg_text(table, simulate(table)) for table in (build("zb-h1", p=4, m=8) for _ in range(2))}
    assert len(texts) == 1
    assert not re.search(r"\d\.\d{3,}\"", texts.pop())


@pytest.mark.parametrize("name", names())
def test_every_family_is_drawn(name):
    table = build(name, p=4, m=8)
    assert len(bars(ET.fromstring(svg_text(table, simulate(table))))) == table.num_actions


@pytest.mark.parametrize("costs", [Costs(0, 0, 0), Costs(0, 1e-9, 0), Costs(1e12, 1, 1)])
def test_odd_costs(costs):
    table = build("1f1b", p=2, m=2)
    root = ET.fromstring(svg_text(table, simulate(table, costs)))
    assert len(bars(root)) == table.num_actions


@pytest.mark.parametrize("until", [1e-9, 0.3, 1, 33, 573, 1e12])
def test_ticks_are_round_and_few(until):
    found = ticks(until, 12)
    assert found[0] == 0
    assert 3 <= len(found) <= 13
    assert found[-1] <= until * (1 + 1e-9)
    assert ticks(0.0, 12) == [0.0]


def test_the_picture_of_the_page_is_what_is_drawn_today():
    page = Path(__file__).parents[3] / "docs" / "zb-v.svg"
    table = build("zb-v", p=4, m=8)
    assert page.read_text(encoding="utf-8") == svg_text(table, simulate(table))
