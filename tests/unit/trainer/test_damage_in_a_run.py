"""What a damaged newest checkpoint does to a run that goes on: nothing sound may go, nothing damaged may pass for
saved.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

from mpipipe.data import build_byte_tokens
from mpipipe.errors import CheckpointError, ConfigError, DataError, MpipipeError
from mpipipe.formats.checkpoint import find_problems, list_checkpoints, read_manifest
from mpipipe.formats.paths import RunPaths
from mpipipe.lifecycle import write_status
from mpipipe.trainer import TrainOutcome, eval_run, train_run
from mpipipe.trainer.folder import on_first_rank
from mpipipe.transport import Transport, run_ranks


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
    said = [record.message for record in caplog.records if "data.train" in record.message]
    files = [f"{tmp_path}/{name}.h5" for name in ("tokens", "other")]
    assert said == [f"data.train was {files[0]} when step-00000004 was saved, and is {files[1]} now"]


def test_another_order_of_the_data_at_a_resume_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(2, tmp_path)
    with caplog.at_level(logging.WARNING):
        start(2, tmp_path, run__steps=5, data__shuffle=False)
    said = [record.message for record in caplog.records if "data.shuffle" in record.message]
    assert said == ["data.shuffle was true when step-00000004 was saved, and is false now"]


@pytest.mark.parametrize("verb", [train_run, eval_run])
def test_a_data_file_that_one_node_lacks_is_told_on_all_ranks(
    verb: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(2, tmp_path)
    tokens = str(tmp_path / "tokens.h5")
    absent = tmp_path / "absent.h5"

    def work(transport: Transport) -> tuple[str, bool, list[str]]:
        mine = str(absent) if transport.rank == 1 else tokens
        keys = {"data__train": [mine], "data__validation": [mine]}
        config = tiny.config(run_dir=str(tmp_path / "run2"), model__vocab=256, **keys)
        with pytest.raises(DataError, match=r"absent\.h5 does not exist") as caught:
            verb(config, transport)
        return str(caught.value), caught.value.seen_alike, caught.value.__notes__

    found = run_ranks(3, work)
    assert [one == found[0] for one in found] == [True] * 3
    assert found[0][1:] == (True, ["Seen on rank 1 only, of 3 ranks."])


def test_a_status_is_json_whatever_the_loss(tmp_path: Path) -> None:
    write_status(tmp_path / "status.json", "done", exit_code=0, loss=float("nan"), step=3)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    status = json.loads((tmp_path / "status.json").read_text(), parse_constant=refuse)
    assert (status["loss"], status["step"]) == (None, 3)


def test_a_resume_from_another_run_does_not_write_over_the_records_of_this_one(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        start(2, tmp_path / name)
    paths = RunPaths(tmp_path / "other" / "run")
    before = paths.metrics.read_text()
    with pytest.raises(ConfigError, match=r"holds a run already, .*another run\.dir"):
        start(2, tmp_path / "other", resume=str(RunPaths(tmp_path / "one" / "run").checkpoint(1)))
    assert paths.metrics.read_text() == before
    assert paths.checkpoint_steps() == (1, 2, 3, 4)


def test_a_checkpoint_folder_of_any_name_can_be_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(2, tmp_path)
    checkpoints = RunPaths(tmp_path / "run").checkpoints
    (checkpoints / "step-00000004").rename(checkpoints / "best")
    for step in (3, 2):
        shutil.rmtree(RunPaths(tmp_path / "run").checkpoint(step))
    monkeypatch.chdir(checkpoints / "best")
    assert start(2, tmp_path, resume=".", run__steps=5).step == 5


@pytest.mark.parametrize("error", [ValueError("odd"), OSError("gone"), CheckpointError("torn")])
def test_any_fault_of_rank_0_alone_in_the_folder_is_the_same_on_all(error: Exception, tmp_path: Path) -> None:
    def fail() -> None:
        raise error

    def work(transport: Transport) -> tuple[type, str, bool]:
        with pytest.raises(MpipipeError) as caught:
            on_first_rank(transport, RunPaths(tmp_path), fail)
        return type(caught.value), str(caught.value), caught.value.seen_alike

    found = run_ranks(3, work)
    assert len(set(found)) == 1
    assert str(error) in found[0][1]
    assert found[0][2]
