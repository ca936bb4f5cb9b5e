"""Which launch and step are looked at, and what the picture and the text say of it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from mpipipe.analysis import load_segment, report, summary
from mpipipe.analysis.report import summary_text
from mpipipe.analysis.segments import place_text, ranges, ranks_text, segment_text
from mpipipe.analysis.spacetime import number_sizes
from mpipipe.errors import ConfigError, TraceFormatError
from mpipipe.formats.paths import RunPaths
from mpipipe.formats.trace import EventKind, TraceWriter
from mpipipe.trace import Recorder


def _launch_without_a_step(run_dir: Path, *, begun: bool, clock: bool = True) -> int:
    """A segment of 2 ranks that recorded no step, or the beginning of one."""
    run = RunPaths(run_dir)
    segment = run.next_segment()
    for rank in range(2):
        header = {"rank": rank, "world_size": 2, "p": 2, "v": 1, "d": 1}
        recorder = Recorder(TraceWriter(run.trace_file(segment, rank), header))
        if clock:
            recorder.clock(10, 0, 4)
        if begun:
            recorder.begin_step(3, 0)
            recorder.record(EventKind.F, 20, 30, row=0, stage=rank, chunk=0, microbatch=0)
        recorder.close(complete=False)
    return segment


@pytest.mark.parametrize("begun, clock", [(False, True), (False, False), (True, True), (True, False)])
def test_a_launch_without_a_whole_step_hides_no_other(
    tmp_path: Path, synthetic: ModuleType, begun: bool, clock: bool
) -> None:
    synthetic.make_run(tmp_path)
    assert _launch_without_a_step(tmp_path, begun=begun, clock=clock) == 2
    found = summary(tmp_path)
    assert found["segment"] == 1
    assert found["segments"] == [{"segment": 1, "num_ranks": 4}, {"segment": 2, "num_ranks": 2}]
    assert found["steps"] == [0, 1, 2]
    (note,) = found["warnings"]
    wanted = "segment 2 (2 ranks): no whole step of 1 begun (step 3 not finished on ranks 0, 1)"
    assert note.startswith("passed over, having no step whole on all ranks: ")
    assert wanted in note if begun else "segment 2 (2 ranks): no whole step of 0 begun" in note
    assert "\nsegment 1 of 2 (4 ranks); --segment N for another\n" in summary_text(found)


def test_a_launch_whose_files_are_cut_hides_no_other(tmp_path: Path, synthetic: ModuleType) -> None:
    synthetic.make_run(tmp_path)
    run = RunPaths(tmp_path)
    run.trace_segment(2).mkdir()
    assert load_segment(tmp_path).segments == {1: 4}
    run.trace_part(2, 0).write_bytes(b"")
    loaded = load_segment(tmp_path)
    assert (loaded.number, loaded.segments) == (1, {1: 4, 2: 1})
    assert "segment 2 (1 rank): " in loaded.warnings[0]
    assert "empty file" in loaded.warnings[0]
    with pytest.raises(TraceFormatError, match="no readable trace file"):
        load_segment(tmp_path, 2)


def test_a_last_segment_with_steps_and_unknown_clocks_is_not_passed_over(tmp_path: Path, synthetic: ModuleType) -> None:
    synthetic.make_run(tmp_path)
    synthetic.make_run(tmp_path, uncalibrated=(1,))
    with pytest.raises(TraceFormatError, match="--allow-uncalibrated"):
        load_segment(tmp_path)
    assert load_segment(tmp_path, allow_uncalibrated=True).number == 2


def test_no_step_in_any_segment(tmp_path: Path) -> None:
    _launch_without_a_step(tmp_path, begun=False)
    _launch_without_a_step(tmp_path, begun=True)
    with pytest.raises(TraceFormatError) as caught:
        summary(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: no step is whole on all ranks in any segment; segment 1 (2 ranks): no whole step of 0 begun; "
        "segment 2 (2 ranks): no whole step of 1 begun (step 3 not finished on ranks 0, 1)"
    )
    assert summary(tmp_path, 2)["steps"] == []
    with pytest.raises(ConfigError) as refused:
        report(tmp_path, tmp_path / "out", step=3, segment=2)
    assert "step 3 is not whole on all ranks: not finished on ranks 0, 1" in str(refused.value)
    assert refused.value.allowed == "none: no step of this segment is whole on all ranks"


def test_numbers_in_words() -> None:
    assert ranges(range(1, 451)) == "1 to 450"
    assert ranges([9, 1, 2, 5, 6, 7]) == "1, 2, 5 to 7, 9"
    assert ranges([]) == "none"
    assert ranges(range(0, 40, 2)) == "0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22 and 8 more"
    assert [ranks_text(4, 4), ranks_text(1, 1), ranks_text(3, 4)] == ["4 ranks", "1 rank", "3 of 4 ranks"]
    assert place_text(5, (3, 5)) == "segment 5 (of 3, 5)"
    assert segment_text(1, (1,), 4, 4) == "segment 1 of 1 (4 ranks)"
    assert segment_text(2, (), 3, 4) == "segment 2 (3 of 4 ranks)"


def test_the_step_drawn_is_that_of_median_duration(
    tmp_path: Path, synthetic: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = []
    module = sys.modules["mpipipe.analysis.report"]
    monkeypatch.setattr(module, "draw_spacetime", lambda *where, note: notes.append((where[1], note)))
    synthetic.make_run(tmp_path, steps=8, jitter=0.5)
    figures = summary(tmp_path)
    spans = {each["step"]: each["makespan_s"] for each in figures["per_step"] if each["step"]}
    assert len(set(spans.values())) == 7
    text = report(tmp_path, tmp_path / "out")[1].read_text()
    ((step, note),) = notes
    assert spans[step] == np.median(list(spans.values()))
    mean = figures["mean"]
    assert note == (
        f"the step of median duration; mean of 7 steps: {mean['makespan_s'] * 1e3:.4g} ms, "
        f"bubble fraction {mean['bubble_fraction']:.3f}"
    )
    assert f"Picture of step {step} (the step of median duration): " in text


def test_the_wait_at_the_end_is_drawn_and_listed_as_waiting(
    tmp_path: Path, synthetic: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    synthetic.make_run(tmp_path, shared_loss=True)
    said: list[str] = []
    whole = figure.Figure.savefig

    def savefig(self, *arguments, **named):
        said.extend(text.get_text() for legend in self.legends for text in legend.get_texts())
        said.extend(axes.get_title(loc="left") for axes in self.axes)
        return whole(self, *arguments, **named)

    monkeypatch.setattr(figure.Figure, "savefig", savefig)
    text = report(tmp_path, tmp_path / "out", step=1)[1].read_text()
    assert "waiting for the others at the step's end" in said
    assert "no action recorded (simulated: waiting)" in said
    assert not any(label == "idle" or label.startswith("other") for label in said)
    title = "Measured: step 1, asked for; mean of 2 steps: 33 ms, bubble fraction 0.273\n"
    assert title + "this step: 33 ms, bubble fraction 0.273 (1f1b, p=4 v=1 m=8)" in said
    heads = next(line for line in text.splitlines() if line.startswith("| rank |")).split(" | ")
    rank3 = next(line for line in text.splitlines() if line.startswith("| 3 |")).split(" | ")
    assert rank3[heads.index("waiting for the others at the step's end")] == "6.000"


def test_numbers_are_drawn_only_where_they_fit() -> None:
    sizes = number_sizes([(30.0, 3), (30.0, 12), (8.9, 12), (8.8, 12), (5.7, 3), (5.6, 3), (0.0, 1)])
    assert sizes == [7.0, 7.0, pytest.approx(5.0), 0.0, pytest.approx(5.0), 0.0, 0.0]
    assert number_sizes([(100.0, 1)] * 10) == [9.0] * 10
    assert number_sizes([(100.0, 1)] * 4001) == [0.0] * 4001
    assert number_sizes([]) == []
