"""Analysis of synthetic traces, whose figures are known exactly."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from mpipipe.analysis import load_segment, report, summary
from mpipipe.errors import ConfigError, TraceFormatError
from mpipipe.formats.trace import FLAG_GRADIENT, EventKind, TraceWriter
from mpipipe.schedule import Costs, simulate
from mpipipe.trace import Recorder

ROOT = Path(__file__).resolve().parents[3]


def _file(made, rank: int) -> Path:
    return made.run_dir / "trace" / f"segment-{made.segment:04d}" / f"rank-{rank:05d}.h5"


def _same_within_1_percent(found: dict, wanted: dict) -> None:
    assert found["steps"] == wanted["steps"]
    assert found["mean"]["bubble_fraction"] == pytest.approx(wanted["mean"]["bubble_fraction"], rel=0.01)
    for one, other in zip(found["per_rank"], wanted["per_rank"], strict=True):
        for key, value in other.items():
            assert one[key] == pytest.approx(value, rel=0.01, abs=2e-6), (one["rank"], key)
            assert one[key] >= 0


def test_1f1b_has_the_bubble_of_its_formula(tmp_path: Path, synthetic: ModuleType) -> None:
    synthetic.make_run(tmp_path)
    found = summary(tmp_path)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["steps"] == [0, 1, 2]
    assert (found["warmup_step"], found["steps_averaged"]) == (0, 2)
    assert found["warnings"] == []
    for each in found["per_step"]:
        assert each["bubble_fraction"] == 3 / 11
        assert each["bubble_fraction_simulated"] == pytest.approx(3 / 11, abs=1e-12)
        assert each["bubble_fraction_simulated_uniform"] == pytest.approx(3 / 11, abs=1e-15)
        assert (each["makespan_s"], each["step_s"], each["tokens"]) == (0.033, 0.036, 1024)
        assert each["loss"] == 2.5 - each["step"] / 10
    rank0, rank3 = found["per_rank"][0], found["per_rank"][3]
    assert (rank0["busy_s"], rank0["wait_gradient_s"], rank0["wait_activation_s"]) == (0.024, 0.009, 0.0)
    assert (rank3["busy_s"], rank3["wait_gradient_s"], rank3["wait_activation_s"]) == (0.024, 0.0, 0.003)
    assert (rank0["optimizer_s"], rank0["other_s"], rank3["other_s"]) == (0.002, 0.001, 0.007)
    stage = found["per_stage"][2]
    assert stage["F"] == {"count": 16, "mean_s": 0.001, "p50_s": 0.001, "p95_s": 0.001}
    assert stage["B"]["mean_s"] == 0.002
    assert found["messages"] == {"count_per_step": 48, "bytes_per_step": 48 * 4096, "expected_per_step": 48}
    assert found["events"][1]["expected"] == found["events"][1]["found"] == {"F": 24, "B": 24, "I": 0, "W": 0}
    assert found["clock"]["receives_before_their_send"] == 0
    assert found["clock"]["receives_matched"] > 30


def test_interleaved_and_uneven_stages_follow_the_simulator(tmp_path: Path, synthetic: ModuleType) -> None:
    costs = Costs(F=[1, 1, 1, 2, 1, 1, 1, 1], I=1, W=[1, 2, 1, 1, 1, 1, 1, 1])
    made = synthetic.make_run(tmp_path, schedule="interleaved", v=2, costs=costs)
    wanted = simulate(made.table, costs)
    found = summary(tmp_path)
    assert found["mean"]["bubble_fraction"] == pytest.approx(wanted.bubble_fraction, abs=1e-9)
    assert found["mean"]["bubble_fraction_simulated"] == pytest.approx(wanted.bubble_fraction, abs=1e-9)
    assert found["mean"]["bubble_fraction_simulated_uniform"] == pytest.approx(3 / 19, abs=1e-12)
    assert found["mean"]["makespan_s"] == pytest.approx(wanted.makespan / 1000, abs=1e-9)
    assert found["per_stage"][1]["B"]["mean_s"] == 0.003
    assert found["messages"]["count_per_step"] == found["messages"]["expected_per_step"] == wanted.messages
    assert [each["busy_s"] for each in found["per_rank"]] == pytest.approx(wanted.busy / 1000)


def test_offset_drift_and_a_clock_set_back_are_corrected(tmp_path: Path, synthetic: ModuleType) -> None:
    """Naive merging is off by seconds; a receive never ends before its send, no wait is negative."""
    wanted = summary(synthetic.make_run(tmp_path / "true").run_dir)
    clocks = {
        1: synthetic.Clock(set_back_at_ns=synthetic.EPOCH_NS + synthetic.STEP_NS + 12 * synthetic.MS,
                           set_back_by_ns=3_000_000_000),
        2: synthetic.Clock(ahead_ns=5_000_000_000),
        3: synthetic.Clock(ahead_ns=-77, ppm=100.0),
    }  # fmt: skip
    made = synthetic.make_run(tmp_path / "skewed", clocks=clocks)
    found = summary(made.run_dir)
    _same_within_1_percent(found, wanted)
    assert found["clock"]["receives_before_their_send"] == 0
    assert found["warnings"] == ["rank 1: clock was set back by 3.000000 s at step 1: undone"]
    segment = load_segment(made.run_dir)
    truth = load_segment(tmp_path / "true")
    for rank in range(4):
        for name in ("t0_ns", "t1_ns"):
            error = np.abs(segment.ranks[rank].events[name] - truth.ranks[rank].events[name]).max()
            assert error <= 10, (rank, name)


def test_wrong_clocks_are_counted_as_receives_before_their_sends(tmp_path: Path, synthetic: ModuleType) -> None:
    synthetic.make_run(tmp_path, clocks={2: synthetic.Clock(ahead_ns=5_000_000_000)}, uncalibrated=(2,))
    with pytest.raises(TraceFormatError, match=r"rank-00002\.h5: group /clock: .*clocks of ranks 2 "):
        load_segment(tmp_path)
    found = summary(tmp_path, allow_uncalibrated=True)
    assert found["clock"]["receives_before_their_send"] > 0
    assert any("ranks 2: clock not compared" in text for text in found["warnings"])
    assert any("receives end before their send began" in text for text in found["warnings"])


def test_a_killed_rank_leaves_its_steps_out_of_averages(tmp_path: Path, synthetic: ModuleType) -> None:
    """Step 4 ends amid on rank 2, later ones do not exist there."""
    synthetic.make_run(tmp_path, steps=6, unfinished={2: 3})
    found = summary(tmp_path)
    assert found["steps"] == [0, 1, 2, 3]
    assert found["steps_left_out"] == [
        {"step": 4, "reason": "not finished on ranks 2"},
        {"step": 5, "reason": "not finished on ranks 2"},
    ]
    assert found["mean"]["bubble_fraction"] == 3 / 11
    assert any("rank-00002.h5.part: not closed" in text for text in found["warnings"])
    assert any("steps 4, 5 are not complete" in text for text in found["warnings"])


def test_missing_rank_is_named_and_the_others_analysed(tmp_path: Path, synthetic: ModuleType) -> None:
    made = synthetic.make_run(tmp_path)
    _file(made, 2).unlink()
    found = summary(tmp_path)
    assert found["missing_ranks"] == [2]
    assert "ranks 2 of 4 are missing: figures are of the others" in found["warnings"]
    assert found["steps"] == [0, 1, 2]
    assert [each["rank"] for each in found["per_rank"]] == [0, 1, 3]
    assert found["mean"]["bubble_fraction"] == 3 / 11
    assert found["mean"]["bubble_fraction_simulated"] == pytest.approx(3 / 11)


def test_cut_empty_doubled_and_foreign_files(tmp_path: Path, synthetic: ModuleType) -> None:
    made = synthetic.make_run(tmp_path / "run", steps=4)
    other = synthetic.make_run(tmp_path / "other", config="seed = 2\n")
    shutil.copy(_file(made, 1), _file(made, 7))
    shutil.copy(_file(made, 0), _file(made, 0).with_name("rank-00000.h5.part"))
    shutil.copy(_file(other, 3), _file(made, 3))
    _file(made, 2).write_bytes(b"")
    found = summary(tmp_path / "run")
    assert found["missing_ranks"] == [2, 3]
    assert found["mean"]["bubble_fraction"] == 3 / 11
    text = "\n".join(found["warnings"])
    assert "rank-00007.h5: the file says rank 1, its name rank 7" in text
    assert "rank-00000.h5.part: rank 0 is already there in rank-00000.h5" in text
    assert "rank-00003.h5: of another run or launch" in text
    assert "rank-00002.h5: empty file" in text


def test_steps_whose_events_were_lost_are_left_out(tmp_path: Path, synthetic: ModuleType) -> None:
    made = synthetic.make_run(tmp_path, steps=3)
    path = _file(made, 1)
    trace = load_segment(tmp_path).ranks[1].trace
    path.unlink()
    header = {"rank": 1, "world_size": 4, "p": 4, "v": 1, "d": 1, "config": trace.config}
    writer = TraceWriter(path, header)
    writer.append_events(trace.events[:-10])
    for row in trace.steps:
        writer.append_step(*(row[name].item() for name in ("step", "t0_ns", "t1_ns", "tokens", "loss", "table")))
    writer.append_clock(*trace.clock[0].tolist())
    writer.close()
    found = summary(tmp_path)
    assert found["steps"] == [0, 1]
    assert found["steps_left_out"][0]["step"] == 2
    assert "rank 1 has " in found["steps_left_out"][0]["reason"]


def test_newest_segment_by_default(tmp_path: Path, synthetic: ModuleType) -> None:
    synthetic.make_run(tmp_path, m=4)
    second = synthetic.make_run(tmp_path, m=8)
    assert second.segment == 2
    assert load_segment(tmp_path).tables[0].m == 8
    assert load_segment(tmp_path, 1).tables[0].m == 4
    assert load_segment(tmp_path / "trace" / "segment-0001").tables[0].m == 4
    assert summary(tmp_path)["segments"] == [{"segment": 1, "num_ranks": 4}, {"segment": 2, "num_ranks": 4}]
    assert [summary(tmp_path, each)["segment"] for each in (None, 1)] == [2, 1]
    assert load_segment(tmp_path, 1).text() == "segment 1 of 2 (4 ranks); --segment N for another"
    assert load_segment(tmp_path / "trace" / "segment-0001").text() == "4 ranks"
    with pytest.raises(ConfigError, match=r"no trace segment 3 \(allowed: 1, 2\)") as caught:
        load_segment(tmp_path, 3)
    assert (caught.value.key, caught.value.value, caught.value.allowed) == ("--segment", 3, "1, 2")
    with pytest.raises(ConfigError, match=r"one segment's own folder \(allowed: RUN_DIR without --segment\)"):
        load_segment(tmp_path / "trace" / "segment-0001", 1)
    for segment in (None, 1):
        with pytest.raises(ConfigError, match=r"looked for trace/segment-NNNN/rank-NNNNN\.h5 .*trace\.enabled"):
            load_segment(tmp_path / "trace" / "segment-0001" / "..", segment)
        with pytest.raises(ConfigError, match="no such folder"):
            load_segment(tmp_path / "none", segment)


def test_nothing_whole_gives_empty_figures_and_no_report(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "rank-00000.h5", {"rank": 0, "world_size": 1, "p": 1, "v": 1, "d": 1})
    recorder = Recorder(writer)
    recorder.begin_step(0, 0)
    recorder.record(EventKind.RECV_WAIT, 10, 20, flags=FLAG_GRADIENT)
    recorder.close(complete=False)
    found = summary(tmp_path)
    assert found["steps"] == []
    assert found["mean"]["bubble_fraction"] is None
    with pytest.raises(TraceFormatError, match="step 0: not finished on ranks 0"):
        report(tmp_path, tmp_path / "out")


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.parametrize("schedule, v", [("1f1b", 1), ("interleaved", 2)])
def test_report_writes_picture_and_text(tmp_path: Path, synthetic: ModuleType, schedule: str, v: int) -> None:
    synthetic.make_run(tmp_path, schedule=schedule, v=v, jitter=0.2)
    picture, text, data = report(tmp_path, tmp_path / "reports", step=1)
    assert picture.name == "spacetime-step-00000001.png"
    content = picture.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(content) > 20_000
    figures = json.loads(data.read_text())
    bubble = figures["mean"]["bubble_fraction"]
    assert f"| bubble fraction, measured | {bubble:.3f} ({100 * bubble:.1f} %) |" in text.read_text()
    assert "| rank | busy |" in text.read_text()
    assert "Picture of step 1 (asked for): `spacetime-step-00000001.png`" in text.read_text()
    with pytest.raises(ConfigError, match=r"step 9 is not in it \(allowed: 0 to 2\)") as caught:
        report(tmp_path, tmp_path / "reports", step=9)
    assert (caught.value.key, caught.value.value, caught.value.exit_code) == ("--step", 9, 2)


def test_analysis_needs_no_framework(tmp_path: Path) -> None:
    blocked = ("torch", "mpi4py", "cupy", "pydantic", "typer", "rich", "matplotlib")
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        f"for name in {blocked!r}: sys.modules[name] = None\n"
        "import mpipipe.analysis, mpipipe.formats.trace, mpipipe.trace\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)


def test_plain_reader_tool_dumps_the_same_events(tmp_path: Path, synthetic: ModuleType) -> None:
    made = synthetic.make_run(tmp_path / "run", steps=2)
    tool = (ROOT / "tools" / "trace_events.py").read_text()
    assert "mpipipe." not in tool.replace("mpipipe-trace", "")
    out = tmp_path / "events.csv"
    command = [sys.executable, str(ROOT / "tools" / "trace_events.py"), str(_file(made, 2)), "-o", str(out)]
    subprocess.run([*command, "--steps", "1:2"], check=True)
    lines = out.read_text().splitlines()
    events = load_segment(made.run_dir).ranks[2].trace.events
    events = events[events["step"] == 1]
    assert lines[0].startswith("rank,t0_ns,t1_ns,")
    assert len(lines) == 1 + len(events)
    fields = dict(zip(lines[0].split(","), lines[1].split(","), strict=True))
    assert int(fields["t0_ns"]) == events["t0_ns"][0]
    assert fields["kind"] == EventKind(events["kind"][0]).name == "RECV_WAIT"
    assert subprocess.run([*command[:2], str(out)], capture_output=True, check=False).returncode == 2
