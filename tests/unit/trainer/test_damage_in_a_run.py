"""What a damaged newest checkpoint does to a run that goes on: nothing sound may go, nothing damaged may pass for
saved.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import tiny

from mpipipe.data import build_byte_tokens
from mpipipe.errors import ConfigError
from mpipipe.formats.checkpoint import find_problems, list_checkpoints, read_manifest
from mpipipe.formats.paths import RunPaths
from mpipipe.lifecycle import write_status
from mpipipe.trainer import TrainOutcome, train_run
from mpipipe.transport import run_ranks


def start(p: int, folder: Path, resume: str | None = None, **keys: object) -> TrainOutcome:
    tokens = folder / "tokens.h5"
    if not tokens.exists():
        (folder / "a.txt").write_text(" ".join(str(k * k % 89) for k in range(200)))
        build_byte_tokens([folder / "a.txt"], tokens)
    settings: dict[str, object] = {
        "run__steps": 4,
        "model__layers": 4,
        "model__vocab": 256,
        "data__train": [str(tokens)],
        "checkpoint__every_steps": 1,
        "lr__schedule": "constant",
        **keys,
    }
    config = tiny.config(run_dir=str(folder / "run"), sequences=4, **settings)
    return run_ranks(p, lambda transport: train_run(config, transport, resume=resume))[0]


def flip_a_bit(folder: Path, step: int) -> None:
    """In the midst of a tensor, so that sizes and manifest stay as they are."""
    checkpoint = RunPaths(folder / "run").checkpoint(step)
    entry = read_manifest(checkpoint).tensors["/parameters/blocks.0.attention.qkv.weight"]
    path = checkpoint / entry.file
    data = bytearray(path.read_bytes())
    data[entry.offset + 40] ^= 1
    path.write_bytes(data)


def sound_steps(folder: Path) -> list[int]:
    listed = list_checkpoints(RunPaths(folder / "run").checkpoints)
    return [entry.step for entry in listed if entry.problem is None and next(find_problems(entry.path), None) is None]


@pytest.mark.parametrize("keep_last", [0, 1])
def test_a_flipped_bit_in_the_newest_checkpoint_is_healed(tmp_path: Path, keep_last: int) -> None:
    start(2, tmp_path)
    flip_a_bit(tmp_path, 4)
    assert sound_steps(tmp_path) == [1, 2, 3]
    start(3, tmp_path, run__steps=5, checkpoint__keep_last=keep_last)
    assert sound_steps(tmp_path) == ([5] if keep_last else [1, 2, 3, 4, 5])
    assert [path.name for path in RunPaths(tmp_path / "run").checkpoints.glob("*.damaged-*")] != []


def test_pruning_does_not_count_a_later_checkpoint_that_was_passed_over(tmp_path: Path) -> None:
    start(2, tmp_path)
    for step in (3, 4):
        flip_a_bit(tmp_path, step)
    start(1, tmp_path, run__steps=3, checkpoint__keep_last=1)
    assert sound_steps(tmp_path) == [3]
    assert RunPaths(tmp_path / "run").checkpoint_steps() == (3, 4)


def test_a_resume_from_an_older_checkpoint_of_the_same_folder_is_refused_at_once(tmp_path: Path) -> None:
    start(2, tmp_path)
    older = RunPaths(tmp_path / "run").checkpoint(2)
    before = RunPaths(tmp_path / "run").metrics.read_text()
    with pytest.raises(ConfigError, match=r"run\.resume: .*holds later checkpoints, up to step 4"):
        start(2, tmp_path, resume=str(older))
    assert RunPaths(tmp_path / "run").metrics.read_text() == before


def test_bytes_that_are_no_text_in_the_metrics_do_not_stop_a_resume(tmp_path: Path) -> None:
    start(2, tmp_path)
    metrics = RunPaths(tmp_path / "run").metrics
    metrics.write_bytes(metrics.read_bytes() + b"garbage\n\x8e\x00")
    start(2, tmp_path, run__steps=5)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [1, 2, 3, 4, 5]


def test_other_data_at_a_resume_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(2, tmp_path)
    (tmp_path / "b.txt").write_text("another text " * 40)
    build_byte_tokens([tmp_path / "b.txt"], tmp_path / "other.h5")
    with caplog.at_level(logging.WARNING):
        start(2, tmp_path, run__steps=5, data__train=[str(tmp_path / "other.h5")])
    assert sum("data.train was" in record.message for record in caplog.records) == 1


def test_a_status_is_json_whatever_the_loss(tmp_path: Path) -> None:
    write_status(tmp_path / "status.json", "done", exit_code=0, loss=float("nan"), step=3)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    status = json.loads((tmp_path / "status.json").read_text(), parse_constant=refuse)
    assert (status["loss"], status["step"]) == (None, 3)
