"""Progress lines, the log's handlers, tables and JSON."""

from __future__ import annotations

import io
import json
import logging

import pytest

from mpipipe.cli import progress
from mpipipe.cli.log_handlers import logging_to
from mpipipe.cli.output import print_json, print_table
from mpipipe.log import LogContext


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def figures(step, steps=25):
    return {"step": step, "steps": steps, "loss": 2.5, "lr": 0.001, "tokens_per_s": 5120.4, "bubble_fraction": 0.125}


def test_a_finished_run_says_how_to_begin_anew_and_that_the_data_are_others():
    told = {"event": "finished", "step": 9, "steps": 9, "dir": "runs/a"}
    text = (
        "nothing left to do: step 9 of run.steps = 9 is done in runs/a. Raise run.steps to go on; to begin anew, set "
        "run.dir to another folder"
    )
    assert progress.event_text(told) == text
    told |= {"trained_on": ["a.h5", "b.h5"], "asked_for": ["c.h5"]}
    assert progress.event_text(told) == f"{text}\nwarning: that run was trained on a.h5, b.h5, not c.h5"


def test_plain_lines_first_every_and_last():
    out = io.StringIO()
    with progress.step_progress(10, out) as show:
        show({"event": "start", "step": 3, "steps": 25, "partition": "stage 0: a\nstage 1: b"})
        for step in range(4, 26):
            show(figures(step))
        show({"event": "evaluation", "step": 25, "validation_loss": 2.25})
        show({"event": "checkpoint", "step": 25, "path": "runs/x"})
    assert out.getvalue().splitlines() == [
        "starts at step 3 of 25",
        "  stage 0: a",
        "  stage 1: b",
        *(f"step {n}/25  loss 2.5000  lr 0.001  5120 tokens/s  bubble fraction 0.125" for n in (4, 10, 20, 25)),
        "step 25: validation loss 2.2500",
        "step 25: saved runs/x",
    ]


def test_a_step_without_a_loss():
    assert (
        progress.step_text({**figures(1), "loss": None})
        == "step 1/25  loss -  lr 0.001  5120 tokens/s  bubble fraction 0.125"
    )


def test_terminal_gets_a_bar():
    out = Terminal()
    with progress.step_progress(10, out) as show:
        show(figures(1))
        show({"event": "evaluation", "step": 1, "validation_loss": 2.25})
        show(figures(25))
    assert "step 25/25" in out.getvalue()
    assert "step 1: validation loss 2.2500" in out.getvalue()


def test_a_terminal_that_nobody_watches_gets_lines():
    """Open MPI's standard output is a terminal, and the file behind it once held the escape sequences of a bar."""
    out = Terminal()
    with progress.step_progress(10, out, bar=False) as show:
        show(figures(1))
    assert out.getvalue() == "step 1/25  loss 2.5000  lr 0.001  5120 tokens/s  bubble fraction 0.125\n"


def test_counted_progress_is_silent_for_two_seconds_then_tells(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with progress.counted_progress("reading", out) as count:
        for second in range(41):
            now[0] = float(second)
            count(second, 40)
    assert [line.split(",")[0] for line in out.getvalue().splitlines()] == [
        "reading: 25 %",
        "reading: 50 %",
        "reading: 75 %",
        "reading: 100 %",
    ]


def test_counted_progress_without_a_known_end(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with progress.counted_progress("reading", out) as count:
        for second in (1, 11, 12):
            now[0] = float(second)
            count(second * 2**20, 0)
    assert out.getvalue().rstrip() == "reading: 11.0 MiB so far"


def test_log_lines(tmp_path, capsys):
    context = LogContext(rank=3, stages="3,7", step=12)
    file = tmp_path / "logs" / "rank-00003.log"
    log = logging.getLogger("mpipipe.some.room")
    with logging_to(context, file):
        log.info("quiet")
        log.debug("detail")
        context.step = 13
        log.warning("loud")
    log.warning("after")
    console = capsys.readouterr().err.splitlines()
    assert len(console) == 1
    assert "rank 3 stage 3,7 step 13 WARNING mpipipe.some.room: loud" in console[0]
    lines = file.read_text().splitlines()
    assert [line.split(": ")[-1] for line in lines] == ["quiet", "detail", "loud"]
    assert "step 12 INFO" in lines[0]
    assert not logging.getLogger("mpipipe").handlers


def test_rank_0_tells_info(capsys):
    with logging_to(LogContext()):
        logging.getLogger("mpipipe.x").info("hello")
        logging.getLogger("mpipipe.x").debug("detail")
    said = capsys.readouterr().err
    assert "rank 0 stage - step - INFO mpipipe.x: hello" in said
    assert "detail" not in said


def test_json_has_no_nan(capsys):
    print_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": (1, {"d": -float("inf")})})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": [1, {"d": None}]}


def test_table(capsys):
    print_table(("step", "size"), [(5, "1 KiB"), (100, "-")])
    assert capsys.readouterr().out == "step  size\n   5  1 KiB\n 100  -\n"


@pytest.mark.parametrize(
    "device, path, line",
    [
        ("cpu", "host", "starts at step 0 of 5 on cpu"),
        ("cuda:1", "staged", "starts at step 0 of 5 on cuda:1, messages staged"),
    ],
)
def test_the_first_line_says_what_is_computed_on(device, path, line):
    told = {"event": "start", "step": 0, "steps": 5, "partition": "", "device": device, "message_path": path}
    assert progress.event_text(told) == line
