"""The HTML page: parsed, its policy checked, its data decoded by its own script where node is at hand."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from importlib import resources

import numpy as np
import pytest

from mpipipe.errors import ScheduleError
from mpipipe.schedule import (
    Costs,
    Disturbance,
    ScheduleTable,
    Shown,
    build,
    critical_path,
    html_text,
    memory_curve,
    phase_bounds,
    simulate,
)
from mpipipe.schedule.draw.html import tick_of

VOID = {"meta", "input", "br"}
NODE = shutil.which("node")
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> ' \" &amp; \u2028 <!--"


class Page(HTMLParser):
    """Elements with attributes, their text, and whether each is closed."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.found, self.texts, self.mistakes = [], [], {}, []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append((tag, len(self.found) - 1))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop()[0] != tag:
            self.mistakes.append(tag)

    def handle_data(self, data):
        if self.open:
            place = self.open[-1][1]
            self.texts[place] = self.texts.get(place, "") + data

    def all(self, tag):
        return [(at, attributes) for at, (name, attributes) in enumerate(self.found) if name == tag]

    def text_of(self, tag):
        return [self.texts.get(at, "") for at, _ in self.all(tag)]

    @property
    def data(self):
        return json.loads(self.texts[next(at for at, a in self.all("script") if a.get("id") == "data")])

    @property
    def script(self):
        return self.texts[next(at for at, a in self.all("script") if not a)]


def shown(name, p=4, m=8, costs=None, **options):
    table = build(name, p=p, m=m, v=2 if name == "interleaved" else None)
    return Shown(table, simulate(table, costs, **options))


def test_one_page_with_nothing_from_elsewhere():
    text = html_text([shown("1f1b"), shown("zb-v")])
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>\n")
    assert not page.open
    assert not page.mistakes
    assert not re.search(r"https?:|//cdn|@import|url\(", text)
    used = {tag for tag, _ in page.found}
    assert not used & {"link", "img", "iframe", "object", "embed", "base", "form"}
    assert not [attributes for _, attributes in page.found if attributes.keys() & {"src", "href", "style", "onclick"}]
    ids = [attributes["id"] for _, attributes in page.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r'getElementById\("([a-z-]+)"\)', page.script)) | {"show-path", "show-memory", "fit"}
    assert wanted <= set(ids)


def test_the_policy_allows_exactly_the_pages_own_script_and_style():
    page = Page(html_text([shown("1f1b")]))
    policy = next(a["content"] for _, a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for text in (page.script, page.text_of("style")[0]):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_names_from_files_do_no_harm():
    tables = [ScheduleTable.from_rows([["0F0", "0B0"]], name=name) for name in (HOSTILE, "\x00\x1b]0;x\x07\ud800")]
    text = html_text([Shown(table, simulate(table)) for table in tables])
    text.encode("utf-8")
    page = Page(text)
    assert not page.open
    assert not page.mistakes
    assert len(page.all("script")) == 2
    assert not page.all("img")
    assert "alert(" not in page.script
    assert page.data["schedules"][0]["name"] == HOSTILE
    assert HOSTILE[:40] in page.text_of("td")[0]
    plain = html_text([shown("1f1b")])
    assert Page(plain).script == page.script


def test_the_table_of_figures():
    page = Page(html_text([shown("1f1b"), shown("zb-v")]))
    cells = page.text_of("td")
    assert len(cells) == 2 * len(page.text_of("th"))
    assert cells[:11] == ["1f1b", "4", "1", "8", "33", "33", "1.000", "0.2727", "1 to 4", "48", "yes"]


def test_the_same_tables_give_the_same_page():
    assert html_text([shown("dualpipe")]) == html_text([shown("dualpipe")])


def test_size_and_limit():
    table = build("gpipe", p=64, m=1500)
    large = Shown(table, simulate(table))
    assert table.num_actions == 192_000
    assert len(html_text([large])) < 5_000_000
    with pytest.raises(ScheduleError, match=r"384000 actions.*at most 200000: .*one schedule a page"):
        html_text([large, large])


def test_ticks_are_exact_where_times_are_decimals():
    assert tick_of(shown("1f1b").simulation) == 1.0
    assert tick_of(shown("1f1b", costs=Costs(2, 2, 4)).simulation) == 2.0
    assert tick_of(shown("1f1b", costs=Costs(0.5, 0.25, 0.5)).simulation) == 0.25
    assert tick_of(shown("gpipe", p=1, m=1, costs=Costs(0, 0, 0)).simulation) == 1.0
    odd = shown("1f1b", costs=Costs(1 / 3, 1, 1)).simulation
    assert tick_of(odd) == odd.makespan / 2**24


def node(code):
    done = subprocess.run([NODE, "-"], input=code, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_scripts_are_javascript(tmp_path):
    (tmp_path / "page.js").write_text(Page(html_text([shown("1f1b")])).script, encoding="utf-8")
    done = subprocess.run([NODE, "--check", tmp_path / "page.js"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


CASES = [
    shown("1f1b", latency=0.5),
    shown("interleaved", costs=Costs(1, 2, 3)),
    shown("dualpipe"),
    shown("v-min", p=5, m=7, costs=Costs(0.7, 0.1, 0.3)),
    shown("chimera", p=4, m=6),
    shown("zb-h1", costs=Costs(1 / 3, 1, 1), disturbance=Disturbance(jitter=0.2)),
]


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_page_decodes_to_the_simulation():
    data = Page(html_text(CASES)).data
    source = resources.files("mpipipe.schedule.draw").joinpath("page_data.js").read_text(encoding="utf-8")
    tell = """
    const keys = ["start", "end", "rank", "need", "path", "phases", "kind", "stage", "microbatch", "partner"];
    const out = data.schedules.map(decode).map((one) => {
      const told = { curves: one.curves.map((c) => [Array.from(c.time), Array.from(c.count)]) };
      for (const key of keys) told[key] = Array.from(one[key]);
      told.waits = told.start.map((_, i) => waitWords(one, i));
      told.found = told.start.map((_, i) => find(one, one.rank[i], (one.start[i] + one.end[i]) / 2, one.second[i]).i);
      return told;
    });
    console.log(JSON.stringify(out));
    """
    for case, got in zip(CASES, json.loads(node(f"{source}\nconst data = {json.dumps(data)};\n{tell}")), strict=True):
        table, simulation = case.simulation.table, case.simulation
        near = {"rtol": 0, "atol": simulation.makespan * 2e-7}
        assert np.allclose(got["start"], simulation.start, **near)
        assert np.allclose(got["end"], simulation.end, **near)
        assert np.allclose(got["phases"], phase_bounds(simulation), **near)
        for key, column in (("stage", table.stages), ("kind", table.kinds), ("microbatch", table.microbatches)):
            assert got[key] == column.tolist()
        assert got["need"] == simulation.needs.tolist()
        assert got["path"] == critical_path(simulation).tolist()
        assert got["found"] == list(range(table.num_actions))
        partners = np.full(table.num_actions, -1)
        partners[table.overlaps], partners[table.overlaps + 1] = table.overlaps + 1, table.overlaps
        assert got["partner"] == partners.tolist()
        for rank, (times, counts) in enumerate(got["curves"]):
            curve = memory_curve(simulation, rank)
            places = np.searchsorted(times, curve.times + near["atol"]) - 1  # the curve has its I's ends too
            assert np.asarray(counts)[places].tolist() == curve.kept.tolist()
            assert len(times) <= len(curve.times)
        if case is CASES[0]:
            first = table.offsets[1]
            assert got["waits"][0] == "no wait before it"
            assert got["waits"][first] == "waited 1.5 for 0F0 of rank 0, which ended at 1; its message took 0.5"
