"""``mpipipe bench``: what is measured, on which rank, what is printed, and that nothing is left behind."""

from __future__ import annotations

import json
import tempfile

import numpy as np
import pytest

from mpipipe.cli import main
from mpipipe.cli.bench_engine import WARM_STEPS, engine_config, event_cost_s, measure_engine
from mpipipe.cli.bench_p2p import WINDOW_BYTES, _medians, _Pair, measure_p2p, parse_sizes
from mpipipe.config import Config
from mpipipe.errors import ConfigError, ScheduleError
from mpipipe.formats.trace import read_trace
from mpipipe.schedule import build
from mpipipe.schedule.exchange import save_table
from mpipipe.transport import run_ranks, solo

RATES = ("to_next_bytes_per_s", "to_previous_bytes_per_s", "both_ways_bytes_per_s")


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """The verbs run on one rank without MPI; temporary folders are made in what it returns."""
    for name in ("PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_ID", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("mpipipe.cli.ranks._open_world", solo)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def tiny(num_ranks, schedule="1f1b", chunks=None, microbatches=4, steps=3, trace=True):
    return engine_config(
        num_ranks, schedule=schedule, chunks=chunks, microbatches=microbatches, steps=steps, trace=trace, wait="auto"
    )


# --- messages ---


def test_sizes():
    assert parse_sizes("64, 8,1KiB,2mib,1 GiB,8,16b") == [8, 16, 64, 1024, 2 << 20, 1 << 30]


@pytest.mark.parametrize("wrong", ["", "8,", "0", "-8", "1.5KiB", "2m", "8 MB", "9GiB", "many", "99999999999"])
def test_wrong_sizes_are_refused_by_name(wrong):
    with pytest.raises(ConfigError, match="is no size of a message") as caught:
        parse_sizes(wrong)
    assert caught.value.key == "--sizes"


@pytest.mark.parametrize(("to_next", "to_previous"), [(True, False), (False, True), (True, True)])
def test_a_stream_goes_the_way_that_it_says(to_next, to_previous):
    """What has arrived is what the other rank sends, in every buffer; a direction that was not asked for moves
    nothing."""

    def work(transport):
        pair = _Pair(transport, 1 - transport.rank, lambda nbytes: np.empty(nbytes, np.uint8), 1000)
        pair._out[:] = 7 + transport.rank
        assert pair.stream(to_next, to_previous) > 0
        return [int(memory.sum()) for memory in pair._into]

    lower, upper = run_ranks(2, work)
    assert len(lower) == 16
    assert upper == [7000 * to_next] * 16
    assert lower == [8000 * to_previous] * 16


def test_a_round_trip_goes_both_ways():
    def work(transport):
        pair = _Pair(transport, 1 - transport.rank, lambda nbytes: np.empty(nbytes, np.uint8), 10)
        pair._out[:] = 7 + transport.rank
        pair.round_trip()
        return int(pair._into[0].sum())

    assert run_ranks(2, work) == [80, 70]


def test_medians_and_rates_are_of_the_right_exchange():
    class Known:
        """Exchanges of known length, every third one late."""

        messages = 4
        calls = 0

        def seconds(self, length):
            self.calls += 1
            return length * (100 if self.calls % 3 == 0 else 1)

        def round_trip(self):
            return self.seconds(6e-6)

        def stream(self, to_next, to_previous):
            return self.seconds({(True, False): 1.0, (False, True): 2.0, (True, True): 5.0}[to_next, to_previous])

    figures = _medians(Known(), 1000, 30)
    assert (figures["repeats"], figures["messages_at_once"]) == (30, 4)
    assert figures["one_way_s"] == 3e-6
    assert [figures[key] for key in RATES] == [4000.0, 2000.0, 1600.0]


def test_every_pair_of_neighbours_is_measured_and_all_ranks_know_it():
    found = run_ranks(3, lambda transport: measure_p2p(Config.from_tables({}), transport, [8, 2 << 20], 30))
    assert found[0] == found[1] == found[2]
    assert (found[0]["num_ranks"], found[0]["device"], found[0]["wait"]) == (3, "cpu", "auto")
    assert sum(found[0]["ranks_per_node"].values()) == 3
    rows = found[0]["pairs"]
    assert [(row["rank"], row["next"], row["message_bytes"]) for row in rows] == [
        (0, 1, 8), (0, 1, 2 << 20), (1, 2, 8), (1, 2, 2 << 20),
    ]  # fmt: skip
    assert [row["repeats"] for row in rows] == [30, 3, 30, 3]  # long ones a tenth as often
    assert [row["messages_at_once"] for row in rows] == [16, WINDOW_BYTES >> 21, 16, WINDOW_BYTES >> 21]
    assert all(row[key] > 0 for row in rows for key in ("one_way_s", *RATES))


def test_ranks_with_other_options_are_refused_alike():
    def work(transport):
        with pytest.raises(ConfigError, match=r"other options than rank \d: ") as caught:
            measure_p2p(Config.from_tables({}), transport, [8 + transport.rank], 3)
        return caught.value.seen_alike

    assert run_ranks(2, work) == [True, True]


def test_one_rank_has_no_neighbour(alone, capsys):
    assert main(["bench", "p2p"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "this launch has one: start it with 'mpirun -n 2 mpipipe bench p2p'" in said.err


def test_a_wrong_wait_policy_is_refused_in_the_words_of_the_run_file(alone, capsys):
    assert main(["bench", "engine", "--wait", "sleep", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["key"] == "comm.wait"


# --- the engine ---


def test_the_engine_is_measured_by_kind_of_event(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = run_ranks(2, lambda transport: measure_engine(tiny(2, "zb-h1"), transport))
    first = found[0]
    assert (first["schedule"], first["p"], first["v"], first["m"]) == ("zb-h1", 2, 1, 4)
    assert (first["actions_per_rank"], first["steps"]) == (12, 3)
    assert first["action_s"] == first["step_s"] / 12
    assert first["step_min_s"] <= first["step_s"] <= first["step_max_s"]
    counts = {kind: figures["events_per_step"] for kind, figures in first["kinds"].items()}
    assert {kind: counts[kind] for kind in "FIW"} == {"F": 4, "I": 4, "W": 4}
    assert counts["RECV_WAIT"] == 4  # 4 forward messages to rank 1, 4 gradients to rank 0
    assert "B" not in counts
    trace = first["trace"]
    assert trace["events_per_step"] >= sum(counts.values()) > 12
    assert trace["share_of_step"] == pytest.approx(trace["events_per_step"] * trace["event_s"] / first["step_s"])
    assert trace["action_s"] == pytest.approx(trace["events_per_step"] * trace["event_s"] / 12)
    assert list(tmp_path.glob("mpipipe-bench-*")) == []


def test_without_a_trace_there_are_times_only(alone, capsys):
    assert main(["bench", "engine", "-m", "3", "--steps", "2", "--no-trace", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kinds"] is found["trace"] is None
    assert (found["num_ranks"], found["m"], found["steps"], found["actions_per_rank"]) == (1, 3, 2, 6)
    assert found["step_s"] > 0


def test_the_text_of_the_engine(alone, capsys):
    assert main(["bench", "engine", "-m", "3", "--steps", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "1f1b: p = 1, v = 1, m = 3, 6 actions (F, B, I, W) a rank; one Linear(8, 8) a stage"
    assert [line.split()[:2] for line in lines if line[:2] in ("F ", "B ")] == [["F", "3.0"], ["B", "3.0"]]
    assert lines[-1].startswith("trace: ")
    assert lines[-1].endswith("% of the step")
    assert list(alone.glob("mpipipe-bench-*")) == []


def test_the_folder_goes_when_a_step_fails(alone, monkeypatch):
    def failing(config, transport, stages):
        assert len(list(alone.glob("mpipipe-bench-*"))) == 1
        raise ZeroDivisionError

    monkeypatch.setattr("mpipipe.cli.bench_engine._tiny_steps", failing)
    with pytest.raises(ZeroDivisionError):
        measure_engine(tiny(1), solo())
    assert list(alone.glob("mpipipe-bench-*")) == []


def test_a_schedule_brings_its_chunks_and_so_does_a_file(tmp_path):
    assert tiny(2, "zb-v").pipeline.chunks == 2
    assert tiny(2, "interleaved", chunks=3).pipeline.chunks == 3
    save_table(build("interleaved", p=2, v=2, m=4), tmp_path / "table.csv")
    config = tiny(2, str(tmp_path / "table.csv"))
    assert (config.pipeline.chunks, config.num_microbatches, config.run.steps) == (2, 4, WARM_STEPS + 3)
    assert tiny(2, "auto").pipeline.chunks == 1


@pytest.mark.parametrize(
    ("schedule", "error", "text"),
    [
        ("nope", ScheduleError, "'nope' is unknown"),
        ("dualpipe", ConfigError, "keeps every stage on two ranks"),
        ("interleaved:x=1", ScheduleError, "is no option of this schedule"),
    ],
)
def test_schedules_that_can_not_run_are_refused(schedule, error, text):
    with pytest.raises(error, match=text):
        tiny(2, schedule)


def test_the_cost_of_an_event_is_that_of_events_in_a_file(tmp_path):
    cost_s = event_cost_s(tmp_path, events=1000)
    assert 1e-8 < cost_s < 1e-3
    assert len(read_trace(tmp_path / "rank-00000.h5").events) == 5000
