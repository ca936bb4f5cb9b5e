"""The Chrome trace of a simulation: strict JSON, tracks whose events nest, flows that pair."""

import itertools
import json
from collections import defaultdict
from dataclasses import replace

import pytest

from mpipipe.errors import ScheduleError
from mpipipe.schedule import Costs, build, simulate
from mpipipe.schedule.costs import Hops
from mpipipe.schedule.exchange import chrome_text


def no_constant(text):
    raise AssertionError(f"{text} is no JSON")


def unique_keys(pairs):
    assert len({key for key, _ in pairs}) == len(pairs)
    return dict(pairs)


def parse(text):
    return json.loads(text, parse_constant=no_constant, object_pairs_hook=unique_keys)


CASES = {
    "1f1b": ("1f1b", {"p": 4, "m": 8}, Costs(), 0.0),
    "latency": ("1f1b", {"p": 4, "m": 8}, Costs(F=1, I=2, W=0.5), 7.25),
    "thirds": ("interleaved", {"p": 4, "v": 2, "m": 8}, Costs(F=1 / 3, I=2 / 7, W=0.1), 0.123456789),
    "small": ("gpipe", {"p": 3, "m": 5}, Costs(F=1e-9, I=2e-9, W=3.3e-9), 1e-10),
    "large": ("gpipe", {"p": 3, "m": 5}, Costs(F=1e15, I=2e15, W=1e15), 1e14),
    "free": ("gpipe", {"p": 2, "m": 2}, Costs(F=0, I=0, W=0), 0.0),
    "pairs": ("dualpipe-v", {"p": 4, "m": 8}, Costs(FB=2.5), 0.5),
    "alone": ("naive", {"p": 1, "m": 2}, Costs(), 1.0),
}


@pytest.fixture(params=CASES)
def case(request):
    name, numbers, costs, latency = CASES[request.param]
    simulation = simulate(build(name, **numbers), costs, latency)
    return simulation, parse(chrome_text(simulation))


def of(found, phase, category=None):
    return [e for e in found["traceEvents"] if e["ph"] == phase and category in (None, e.get("cat"))]


def test_the_events_are_those_of_the_simulation(case):
    simulation, found = case
    table, scale = simulation.table, found["otherData"]["unit_us"]
    compute = of(found, "X", "compute")
    assert [event["name"] for event in compute] == [str(a) for rank in range(table.p) for a in table.actions(rank)]
    error = 1e-9 * simulation.makespan + 1.0 / scale
    assert [event["ts"] / scale for event in compute] == pytest.approx(simulation.start.tolist(), abs=error)
    ends = [(event["ts"] + event["dur"]) / scale for event in compute]
    assert ends == pytest.approx(simulation.end.tolist(), abs=error)
    assert found["otherData"]["makespan"] == simulation.makespan
    assert (found["otherData"]["p"], found["otherData"]["schedule"]) == (table.p, table.name)
    for event in of(found, "X"):
        assert isinstance(event["ts"], int)
        assert isinstance(event["dur"], int)
        assert min(event["ts"], event["dur"]) >= 0


def test_no_two_events_of_a_track_overlap(case):
    simulation, found = case
    tracks = defaultdict(list)
    for event in of(found, "X"):
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert {pid for pid, _ in tracks} == set(range(simulation.table.p))
    for spans in tracks.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


def test_a_flow_leads_from_each_send_to_its_receive(case):
    simulation, found = case
    sends, receives = of(found, "X", "send"), of(found, "X", "receive")
    begins, ends = {e["id"]: e for e in of(found, "s")}, {e["id"]: e for e in of(found, "f")}
    assert len(of(found, "s")) == len(of(found, "f")) == len(begins) == simulation.messages
    assert begins.keys() == ends.keys()
    assert len(sends) == len(receives) == simulation.messages
    latency = simulation.latency * found["otherData"]["unit_us"]
    for number, (send, receive) in enumerate(zip(sends, receives, strict=True)):
        first, last = begins[number], ends[number]
        assert (first["cat"], first["name"]) == (last["cat"], last["name"])
        assert (first["pid"], first["tid"], first["ts"]) == (send["pid"], send["tid"], send["ts"])
        assert (last["pid"], last["tid"]) == (receive["pid"], receive["tid"])
        assert last["ts"] == receive["ts"] + receive["dur"]
        assert last["bp"] == "e"
        assert send["dur"] == pytest.approx(latency, abs=1)
        assert first["ts"] + send["dur"] <= last["ts"]
        stage, kind, microbatch = send["name"].partition("SEND_F" if "SEND_F" in send["name"] else "SEND_B")
        step = 1 if kind == "SEND_F" else -1
        assert receive["name"] == f"{int(stage) + step}{kind.replace('SEND', 'RECV')}{microbatch}"
        assert (send["args"]["from_rank"], send["args"]["to_rank"]) == (send["pid"], receive["pid"])


def test_every_track_has_a_name_and_a_place(case):
    simulation, found = case
    names = {(e["name"], e["pid"], e["tid"]): e["args"] for e in of(found, "M")}
    assert len(names) == len(of(found, "M"))
    for rank in range(simulation.table.p):
        assert names["process_name", rank, 1] == {"name": f"rank {rank}"}
        assert names["process_sort_index", rank, 1] == {"sort_index": rank}
    for pid, tid in {(e["pid"], e["tid"]) for e in found["traceEvents"]}:
        assert names["thread_name", pid, tid]["name"].split()[0] in ("compute", "receives", "sends")
        assert names["thread_sort_index", pid, tid] == {"sort_index": tid}


@pytest.mark.parametrize(
    ("costs", "latency", "unit_us"),
    [(Costs(), 0.0, 1000), (Costs(F=0.0131), 0.0, 10_000), (Costs(), 0.0625, 10_000), (Costs(F=1 / 3), 0.0, 10**9)],
)
def test_the_unit_is_as_large_as_the_times_need(costs, latency, unit_us):
    found = parse(chrome_text(simulate(build("1f1b", p=2, m=3), costs, latency)))
    assert found["otherData"]["unit_us"] == unit_us


def test_waiting_is_the_length_of_a_receive():
    found = parse(chrome_text(simulate(build("1f1b", p=2, m=1), Costs(), 0.5)))
    spans = {e["name"]: (e["ts"], e["dur"]) for e in of(found, "X")}
    assert spans == {
        "0F0": (0, 1000),
        "1F0": (1500, 1000),
        "1B0": (2500, 2000),
        "0B0": (5000, 2000),
        "0SEND_F0": (1000, 500),
        "1RECV_F0": (0, 1500),
        "1SEND_B0": (4500, 500),
        "0RECV_B0": (1000, 4000),
    }


def test_a_message_is_as_long_on_its_way_as_its_size_says():
    hops = Hops(latency=1.0, nbytes=[8.0, 16.0, 99.0], bandwidth=4.0)
    found = parse(chrome_text(simulate(build("gpipe", p=3, m=1), hops=hops)))
    spans = {e["name"]: e["dur"] for e in of(found, "X", "send")}
    assert spans == {"0SEND_F0": 3000, "1SEND_F0": 5000, "2SEND_B0": 5000, "1SEND_B0": 3000}


def test_the_actions_of_a_pair_have_two_tracks():
    found = parse(chrome_text(simulate(build("dualpipe-v", p=2, m=4), Costs(FB=2.5))))
    tracks = {(e["pid"], e["args"]["name"]) for e in of(found, "M") if e["name"] == "thread_name"}
    assert {(0, "compute"), (0, "compute 2"), (1, "compute 2")} <= tracks


def test_times_without_end_are_refused():
    simulation = replace(simulate(build("gpipe", p=1, m=3)), makespan=float("inf"))
    with pytest.raises(ScheduleError, match="infinite"):
        chrome_text(simulation)


def test_a_timeline_too_large_for_a_viewer_is_refused():
    table = build("gpipe", p=16, m=8192)
    with pytest.raises(ScheduleError, match="too large for a timeline of at most 200000 actions"):
        chrome_text(simulate(table))
