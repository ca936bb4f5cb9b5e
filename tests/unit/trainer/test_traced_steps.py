"""Which steps a trace holds, and what their time is."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import little
import pytest

from mpipipe.errors import SetupError
from mpipipe.formats.paths import RunPaths
from mpipipe.formats.trace import EventKind, TraceWriter, read_trace
from mpipipe.trainer import Trainer, tracing
from mpipipe.transport import Transport, run_ranks, solo


def test_what_comes_after_the_last_traced_step_is_not_in_the_trace(tmp_path: Path) -> None:
    config = little.config(run_dir=str(tmp_path), trace__enabled=True, trace__first_step=2, trace__last_step=3)
    with Trainer(config, [little.linear()], little.square_loss, transport=solo()) as trainer:
        for step in range(5):
            trainer.step(little.batch(step))
            trainer.evaluate([little.batch(9)])
            trainer.save()
    events = read_trace(RunPaths(tmp_path).trace_file(1, 0)).events
    for kind in (EventKind.EVALUATE, EventKind.CHECKPOINT):
        assert Counter(events["step"][events["kind"] == kind].tolist()) == {2: 1, 3: 1}


def test_the_time_of_a_step_is_without_the_opening_of_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's time limit counts the longest step: the first one would stop it too soon."""

    def slowly(*given: object) -> TraceWriter:
        time.sleep(1.0)
        return tracing.open_trace(*given)  # type: ignore[arg-type]

    monkeypatch.setattr("mpipipe.trainer.trainer.open_trace", slowly)
    config = little.config(run_dir=str(tmp_path), trace__enabled=True)
    with Trainer(config, [little.linear()], little.square_loss, transport=solo()) as trainer:
        assert trainer.step_report(little.batch(0)).step_s < 1.0


def test_where_one_rank_can_not_open_its_trace_no_rank_leaves_a_file(tmp_path: Path) -> None:
    config = little.config(run_dir=str(tmp_path), trace__enabled=True)
    paths = RunPaths(tmp_path)
    paths.trace_segment(1).mkdir(parents=True)
    open_files = []

    def work(transport: Transport) -> str:
        layers = [little.linear() for _ in range(3)]
        trainer = Trainer(config, layers, little.square_loss, transport=transport)
        with pytest.raises(SetupError, match=r"the trace can't be written in .*: rank 1: .*trace\.enabled") as caught:
            trainer.step(little.batch(0))
        return str(caught.value)

    def refuse(path: Path, header: dict[str, object]) -> TraceWriter:
        if header["rank"] == 1:
            raise PermissionError(13, "Permission denied", str(path))
        open_files.append(TraceWriter(path, header))
        return open_files[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpipipe.trainer.tracing.TraceWriter", refuse)
        assert len(set(run_ranks(3, work))) == 1
    assert list(paths.trace_segment(1).iterdir()) == []
    assert [writer.closed for writer in open_files] == [True, True]
