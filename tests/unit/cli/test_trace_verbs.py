"""``mpipipe trace``: what is passed on, printed and refused. Needs neither torch nor MPI."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from mpipipe.cli import main


def json_of(capsys, *arguments, code=0):
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_trace_verbs_pass_on_what_they_are_told(capsys, tmp_path, monkeypatch):
    import mpipipe.analysis
    import mpipipe.analysis.report

    asked = []

    class Loaded:
        number, segments = 1, {1: 4, 2: 3}

        def text(self):
            return "segment 1 of 2"

    def load_segment(run_dir, segment, *, allow_uncalibrated):
        asked.append((run_dir, segment, allow_uncalibrated))
        return Loaded()

    def summary(loaded):
        assert isinstance(loaded, Loaded)
        return {"p": 2}

    def report(loaded, folder, step):
        assert isinstance(loaded, Loaded)
        asked.append((folder, step))
        return [folder / "a.png"]

    monkeypatch.setattr(mpipipe.analysis, "load_segment", load_segment)
    monkeypatch.setattr(mpipipe.analysis, "summary", summary)
    monkeypatch.setattr(mpipipe.analysis, "report", report)
    monkeypatch.setattr(sys.modules["mpipipe.analysis.report"], "summary_text", lambda figures: f"text of {figures}\n")
    run = str(tmp_path)
    assert json_of(capsys, "trace", "summary", run, "--segment", "3", "--allow-uncalibrated") == {"p": 2}
    assert main(["trace", "summary", run]) == 0
    assert capsys.readouterr().out == "text of {'p': 2}\n"
    assert json_of(capsys, "trace", "report", run) == {
        "segment": 1,
        "segments": [{"segment": 1, "num_ranks": 4}, {"segment": 2, "num_ranks": 3}],
        "files": [str(tmp_path / "reports" / "a.png")],
    }
    assert main(["trace", "report", run, "-o", f"{run}/x", "--step", "7", "--segment", "2"]) == 0
    assert capsys.readouterr().out == f"segment 1 of 2\n{run}/x/a.png\n"
    assert asked == [
        (tmp_path, 3, True),
        (tmp_path, None, False),
        (tmp_path, None, False),
        (tmp_path / "reports", None),
        (tmp_path, 2, False),
        (tmp_path / "x", 7),
    ]


def test_trace_of_nothing(capsys, tmp_path):
    error = json_of(capsys, "trace", "summary", str(tmp_path / "none"), code=2)["error"]
    assert "no such folder" in error["message"]
    error = json_of(capsys, "trace", "report", str(tmp_path), code=2)["error"]
    assert (error["type"], error["key"]) == ("ConfigError", "RUN_DIR")
    assert "looked for trace/segment-NNNN/rank-NNNNN.h5" in error["message"]
    (tmp_path / "rank-00000.h5").write_bytes(b"")
    blocked = "import sys\nfor name in ('torch', 'mpi4py', 'cupy'): sys.modules[name] = None\n"
    code = f"{blocked}from mpipipe.cli import main\nsys.exit(main(['trace', 'summary', {str(tmp_path)!r}, '--json']))"
    root = str(Path(__file__).parents[3])
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=root, check=False)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["error"]["type"] == "TraceFormatError"


def test_a_segment_that_is_not_there_is_a_usage_error(capsys, tmp_path):
    segment = tmp_path / "trace" / "segment-0002"
    segment.mkdir(parents=True)
    (segment / "rank-00000.h5.part").write_bytes(b"")
    for verb in ("summary", "report"):
        error = json_of(capsys, "trace", verb, str(tmp_path), "--segment", "1", code=2)["error"]
        assert (error["type"], error["key"], error["allowed"]) == ("ConfigError", "--segment", "2")
        damaged = json_of(capsys, "trace", verb, str(tmp_path), "--segment", "2", code=1)["error"]
        assert "empty file" in damaged["message"]
    assert not (tmp_path / "reports").exists()
