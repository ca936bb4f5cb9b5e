"""Whole runs over loopback, from token files to metrics, status and checkpoints, and on from there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import tiny

from mpipipe import lifecycle
from mpipipe.config import Config
from mpipipe.data import build_byte_tokens
from mpipipe.errors import CheckpointError, ConfigError, DataError, SetupError
from mpipipe.formats.checkpoint import list_checkpoints, read_manifest
from mpipipe.formats.paths import RunPaths
from mpipipe.lifecycle import RunLock
from mpipipe.trainer import Trainer, TrainOutcome, eval_run, train_run
from mpipipe.transport import Transport, run_ranks, solo

KEYS = ("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_s", "bubble_fraction")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    for number in range(4):
        text = " ".join(f"{number * k * k % 97} is {k}" for k in range(150))
        (folder / f"{number}.txt").write_text(text)
    build_byte_tokens(
        sorted(folder.glob("*.txt")), folder / "train.h5", validation=folder / "valid.h5", validation_every=4
    )
    return folder


def config(tokens: Path, run_dir: Path, **keys: object) -> Config:
    settings: dict[str, object] = {
        "run__steps": 6,
        "model__layers": 4,
        "model__vocab": 256,
        "data__train": [str(tokens / "train.h5")],
        "checkpoint__every_steps": 3,
        "sequences": 4,
        "lr__warmup_steps": 1,
        **keys,
    }
    return tiny.config(run_dir=str(run_dir), **settings)


def run(p: int, config: Config, **given: object) -> TrainOutcome:
    outcomes = run_ranks(p, lambda transport: train_run(config, transport, **given))
    assert len({outcome.step for outcome in outcomes}) == 1
    return outcomes[0]


def lines(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def facts(run_dir: Path) -> list[tuple[object, ...]]:
    """What does not hang on the machine's speed."""
    return [tuple(line[key] for key in ("step", "loss", "grad_norm", "lr", "tokens")) for line in lines(run_dir)]


def status(run_dir: Path) -> dict[str, object]:
    return json.loads((run_dir / "status.json").read_text())


def checksums(run_dir: Path, step: int) -> dict[str, str]:
    manifest = read_manifest(RunPaths(run_dir).checkpoint(step))
    return {name: entry.checksum for name, entry in manifest.tensors.items()}


@pytest.fixture(scope="module")
def whole(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps on one rank that nothing interrupts."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    outcome = run(1, config(tokens, run_dir, data__validation=[str(tokens / "valid.h5")], eval__every_steps=2))
    assert (outcome.exit_code, outcome.step) == (0, 6)
    return run_dir


def test_a_run_leaves_one_line_a_step_status_and_checkpoints(whole: Path) -> None:
    found = lines(whole)
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    for line in found:
        assert tuple(line)[: len(KEYS)] == KEYS
        assert line["tokens"] == 4 * tiny.SEQUENCE
        assert 0.0 <= line["bubble_fraction"] < 1.0  # type: ignore[operator]
        assert ("validation_loss" in line) == (line["step"] in (2, 4, 6))
    assert [entry.step for entry in list_checkpoints(whole / "checkpoints")] == [3, 6]
    ended = status(whole)
    assert (ended["state"], ended["exit_code"], ended["step"]) == ("done", 0, 6)
    assert ended["loss"] == found[-1]["loss"]
    assert Config.load(whole / "config.toml").run.steps == 6


@pytest.mark.parametrize("p", [2, 3])
def test_ranks_write_the_same_metrics_and_checkpoints(p: int, tokens: Path, whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    reported: list[object] = []
    run(p, config(tokens, run_dir), report=lambda line: reported.append(line["event"]))
    assert facts(run_dir) == facts(whole)
    assert checksums(run_dir, 6) == checksums(whole, 6)
    assert reported.count("step") == 6 * p


@pytest.mark.parametrize("pieces", [[(1, 3), (2, 6)], [(3, 2), (1, 3), (2, 6)], [(2, 1), (2, 6), (2, 6)]])
def test_a_run_in_pieces_equals_the_whole(
    pieces: list[tuple[int, int]], tokens: Path, whole: Path, tmp_path: Path
) -> None:
    """(ranks, killed after step) of each launch; a launch that is killed has the metrics of steps it did not save."""

    class KilledError(Exception):
        pass

    run_dir = tmp_path / "run"
    for number, (p, last) in enumerate(pieces):

        def report(line: dict[str, object], stop: int = last) -> None:
            if line["event"] == "step" and line["step"] == stop and stop < 6:
                raise KilledError

        if last < 6:
            with pytest.raises(KilledError):
                run(p, config(tokens, run_dir, checkpoint__every_steps=1 if number else 2), report=report)
            with (run_dir / "metrics.jsonl").open("a") as stream:
                stream.write('{"step": 17, "loss": 0.5}\n{"step": 4, "lo')
        else:
            assert run(p, config(tokens, run_dir)).exit_code == 0
    assert facts(run_dir) == facts(whole)
    assert checksums(run_dir, 6) == checksums(whole, 6)
    assert status(run_dir)["state"] == "done"


def test_a_run_that_is_done_is_left_as_it_is(tokens: Path, whole: Path) -> None:
    before = facts(whole)
    assert run(2, config(tokens, whole)).step == 6
    assert facts(whole) == before
    assert status(whole)["state"] == "done"


def test_never_resuming_refuses_a_used_folder_and_touches_nothing(tokens: Path, whole: Path) -> None:
    def content() -> dict[str, tuple[int, bytes]]:
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in whole.rglob("*") if path.is_file()}

    before = content()
    for p in (1, 2):
        with pytest.raises(ConfigError, match=r"run\.dir: .*holds an earlier run") as caught:
            run(p, config(tokens, whole, run__steps=9), resume="never")
        assert caught.value.key == "run.dir"
        with pytest.raises(ConfigError, match=r"run\.dir"):
            run(p, config(tokens, whole, run__resume="never"))
    assert content() == before


def test_never_resuming_begins_in_a_new_folder(tokens: Path, whole: Path, tmp_path: Path) -> None:
    assert run(1, config(tokens, tmp_path / "a" / "b" / "run"), resume="never").exit_code == 0
    assert facts(tmp_path / "a" / "b" / "run") == facts(whole)


def test_resuming_from_a_named_checkpoint_of_another_run(tokens: Path, whole: Path, tmp_path: Path) -> None:
    folder = RunPaths(whole).checkpoint(3)
    run(2, config(tokens, tmp_path / "run"), resume=str(folder))
    assert facts(tmp_path / "run") == facts(whole)[3:]
    assert checksums(tmp_path / "run", 6) == checksums(whole, 6)
    for wrong, problem in ((tmp_path / "nowhere", "does not exist"), (whole, "is a run folder: name one of its")):
        with pytest.raises(ConfigError, match=problem):
            run(2, config(tokens, tmp_path / "other"), resume=str(wrong))
    assert not (tmp_path / "other").exists()


def test_a_finished_run_has_nothing_left_to_do(tokens: Path, tmp_path: Path) -> None:
    done = run(2, config(tokens, tmp_path))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    said: list[dict[str, object]] = []
    again = run(3, config(tokens, tmp_path), report=said.append)
    assert (again.exit_code, again.step, again.checkpoint) == (0, done.step, done.checkpoint)
    expected = {"event": "finished", "step": done.step, "steps": done.step, "dir": str(tmp_path)}
    assert said == [expected] * 3
    other = config(tokens, tmp_path).model_copy(update={"data": config(tokens, tmp_path).data.model_copy(
        update={"train": ("other.h5",)})})  # fmt: skip
    said.clear()
    run(1, other, report=said.append)
    assert said == [expected | {"trained_on": [str(tokens / "train.h5")], "asked_for": ["other.h5"]}]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("saved", "note"), [
    (2, "the same command goes on from step 2"), (0, "no step was saved yet")])  # fmt: skip
def test_an_interrupt_says_where_the_run_goes_on(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: int, note: str
) -> None:
    step = Trainer.step_report

    def interrupted(self: Trainer, *given: object, **named: object) -> object:
        if self.step_index == 3:
            raise KeyboardInterrupt
        return step(self, *given, **named)

    monkeypatch.setattr(Trainer, "step_report", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        train_run(config(tokens, tmp_path, checkpoint__every_steps=saved), solo())
    assert caught.value.__notes__ == [note]
    assert (status(tmp_path)["state"], status(tmp_path)["error"]) == ("failed", "interrupted (SIGINT)")


def test_a_folder_in_which_another_launch_writes_is_refused(tokens: Path, tmp_path: Path) -> None:
    lock = RunLock(RunPaths(tmp_path).lock)
    assert lock.acquire() is None
    RunPaths(tmp_path).status.write_text("of the other launch")
    with pytest.raises(ConfigError, match=r"another launch is writing to .*host .*, process \d+"):
        run(2, config(tokens, tmp_path))
    assert RunPaths(tmp_path).status.read_text() == "of the other launch"
    lock.release()
    assert run(2, config(tokens, tmp_path)).exit_code == 0


def test_a_time_limit_stops_with_75_and_the_run_goes_on(
    tokens: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reached on one rank only, after its third question."""
    asked = {"times": 0}

    def reached(limit: object) -> bool:
        asked["times"] += 1
        return asked["times"] == 3

    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(lifecycle.TimeLimit, "reached", property(reached))
        stopped = run(2, config(tokens, run_dir, checkpoint__every_steps=0))
    assert stopped.exit_code == 75
    assert stopped.step == 2
    assert (status(run_dir)["state"], status(run_dir)["exit_code"]) == ("stopped", 75)
    assert [entry.step for entry in list_checkpoints(run_dir / "checkpoints")] == [2]
    assert run(3, config(tokens, run_dir)).exit_code == 0
    assert facts(run_dir) == facts(whole)
    assert checksums(run_dir, 6) == checksums(whole, 6)


def test_a_time_limit_in_the_last_step_is_no_stop(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle.TimeLimit, "reached", property(lambda limit: True))
    assert run(1, config(tokens, tmp_path / "run", run__steps=1, lr__warmup_steps=0)).exit_code == 0
    assert status(tmp_path / "run")["state"] == "done"


def test_a_real_time_limit_is_kept(tokens: Path, tmp_path: Path) -> None:
    outcome = run(1, config(tokens, tmp_path / "run", run__steps=100000, run__time_limit="2s"))
    assert outcome.exit_code == 75
    assert 1 <= outcome.step < 100000
    assert len(lines(tmp_path / "run")) == outcome.step


def test_an_evaluation_changes_nothing_on_disk_and_gives_the_training_s_figure(tokens: Path, whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    last = lines(whole)[-1]["validation_loss"]
    for p in (1, 3):
        asked = config(tokens, whole, data__validation=[str(tokens / "valid.h5")])
        for figures in run_ranks(p, lambda transport, asked=asked: eval_run(asked, transport)):
            assert (figures["step"], figures["validation_loss"]) == (6, last)
            assert figures["tokens"] == figures["sequences"] * tiny.SEQUENCE  # type: ignore[operator]
    third = run_ranks(1, lambda transport: eval_run(asked, transport, resume=str(RunPaths(whole).checkpoint(3))))[0]
    assert third["step"] == 3
    assert third["validation_loss"] != last
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


def test_an_evaluation_without_a_run_makes_no_folder(tokens: Path, tmp_path: Path) -> None:
    asked = config(tokens, tmp_path / "none", data__validation=[str(tokens / "valid.h5")], eval__batches=2)
    with pytest.raises(ConfigError, match=r"run\.dir: .*none holds no checkpoint"):
        run_ranks(2, lambda transport: eval_run(asked, transport))
    figures = run_ranks(2, lambda transport: eval_run(asked, transport, resume="never"))[0]
    assert (figures["step"], figures["sequences"]) == (0, 8)
    assert figures["validation_loss"] == pytest.approx(np.log(256), rel=0.02)
    assert not (tmp_path / "none").exists()


def test_evaluations_in_between_change_no_bit(tokens: Path, whole: Path, tmp_path: Path) -> None:
    """``whole`` evaluates at the start and every second step; here nothing is evaluated."""
    run(1, config(tokens, tmp_path / "run"))
    assert checksums(tmp_path / "run", 6) == checksums(whole, 6)


def test_another_seed_is_refused_and_the_run_stays_whole(tokens: Path, whole: Path) -> None:
    kept = (whole / "config.toml").read_bytes()
    for p in (1, 2):
        with pytest.raises(ConfigError, match=r"run\.seed: .*made with seed 3") as caught:
            run(p, config(tokens, whole, run__seed=4, run__steps=9))
        assert (caught.value.key, caught.value.allowed) == ("run.seed", "3")
    assert (whole / "config.toml").read_bytes() == kept
    assert (status(whole)["state"], status(whole)["exit_code"]) == ("failed", 2)
    assert run(1, config(tokens, whole)).exit_code == 0


@pytest.mark.parametrize("p", [1, 3])
def test_a_damaged_only_checkpoint_is_refused_and_not_begun_anew(p: int, tokens: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run(1, config(tokens, run_dir, run__steps=2, checkpoint__every_steps=0))
    folder = RunPaths(run_dir).checkpoint(2)
    entry = next(e for name, e in read_manifest(folder).tensors.items() if name.endswith("norm1.weight"))
    with (folder / entry.file).open("r+b") as stream:
        stream.seek(entry.offset)
        stream.write(b"x")
    with pytest.raises(CheckpointError, match="no checkpoint is whole") as caught:
        run(p, config(tokens, run_dir))
    assert caught.value.seen_alike
    assert (status(run_dir)["state"], status(run_dir)["exit_code"]) == ("failed", 1)
    assert len(lines(run_dir)) == 2
    os.rename(RunPaths(run_dir).checkpoint(2), run_dir / "aside")
    assert run(p, config(tokens, run_dir, run__steps=2)).step == 2


def test_a_damaged_newest_checkpoint_is_passed_over(tokens: Path, whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run(2, config(tokens, run_dir))
    (RunPaths(run_dir).checkpoint(6) / "manifest.json").unlink()
    assert run(2, config(tokens, run_dir)).step == 6
    assert facts(run_dir) == facts(whole)
    assert checksums(run_dir, 6) == checksums(whole, 6)


def test_bad_data_is_told_in_the_status_with_the_exit_code_of_the_job(tokens: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with pytest.raises(DataError, match=r"data\.train: .*none\.h5 does not exist"):
        run(2, config(tokens, run_dir, data__train=[str(tokens / "none.h5")]))
    assert (status(run_dir)["state"], status(run_dir)["exit_code"]) == ("failed", 2)


def test_a_folder_that_can_not_be_made_is_the_machine_s_fault(tokens: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SetupError, match=r"run\.dir"):
        run(2, config(tokens, tmp_path / "file" / "run"))


def test_a_failure_on_one_rank_is_told_with_that_rank(tokens: Path, tmp_path: Path) -> None:
    def work(transport: Transport) -> None:
        def report(line: dict[str, object]) -> None:
            if line["event"] == "step" and transport.rank == 1:
                raise ArithmeticError("of rank 1")

        train_run(config(tokens, tmp_path / "run"), transport, report=report)

    with pytest.raises(ArithmeticError):
        run_ranks(3, work)
    ended = status(tmp_path / "run")
    assert (ended["state"], ended["exit_code"]) == ("failed", 1)
