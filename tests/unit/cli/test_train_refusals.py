"""Run files and settings that ``mpipipe train`` refuses: told once, as text or one JSON object, exit code 2."""

from __future__ import annotations

import json
import random

import pytest

from mpipipe.cli import main
from mpipipe.transport import run_ranks

RUN_FILE = "[model]\nlayers = 8\nhidden = 32\nheads = 4\nsequence = 16\n[batch]\nsequences = 16\n"
GOOD = RUN_FILE + '[data]\ntrain = ["none.h5"]\n[pipeline]\nschedule = "gpipe"\n[lr]\nwarmup_steps = 10\n'
LETTERS = "[]{}=.\"'#\n\\ -+e019xz_,\u00e9\x00"


def one_rank(monkeypatch, *arguments):
    """The exit code of a verb on one rank of the in-process transport."""

    def on_it(transport):
        monkeypatch.setattr("mpipipe.cli.ranks._open_world", lambda: transport)
        return main(list(arguments))

    return run_ranks(1, on_it)[0]


def refusal(capsys, monkeypatch, *arguments):
    """The text of a refusal, told once, as text and as one JSON object; exit code 2 both times."""
    assert one_rank(monkeypatch, *arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("error: ") == 1
    text = said.err.removeprefix("error: ").rstrip("\n")
    assert one_rank(monkeypatch, *arguments, "--json") == 2
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.count("\n") == 1
    error = json.loads(said.out)["error"]
    assert set(error) == {"type", "message", "key", "allowed"}
    assert error["message"] == text
    return text


def mutated(dice):
    text = list(GOOD)
    for _ in range(dice.randint(1, 2)):
        place = dice.randrange(len(text))
        text[place] = dice.choice(["", dice.choice(LETTERS), text[place] + dice.choice(LETTERS), text[place] * 2])
    return "".join(text)


def test_train_refuses_mutated_run_files_once_as_text_and_as_json(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run_file, dice = tmp_path / "run.toml", random.Random(4)
    begins = {"data": 0, "file": 0}
    for _ in range(60):
        run_file.write_text(mutated(dice), encoding="utf-8")
        text = refusal(capsys, monkeypatch, "train", "run.toml")
        assert "Traceback" not in text
        begins["file" if text.startswith("run.toml: ") else "data"] += 1
        assert text.startswith(("run.toml: ", "data.train: ")), text
    assert begins["file"] > 30
    assert begins["data"] > 3  # the mutation was no fault: the token file is missing
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.toml"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["pipeline.schedule=gpip"], "--set: pipeline.schedule: \"gpip\" is no schedule. Did you mean 'gpipe'?"),
        (["pipeline.schedule=1f1b", "pipeline.chunks=2"], "--set: pipeline.schedule"),
        (["pipeline.ranks=2"], "--set: pipeline.ranks: this setting asks for 2 ranks, the launch has 1 "),
        (["pipeline.chunks=9"], "--set: pipeline.chunks: 9 chunks are more than model.layers = 8"),
        (["run.seed=1", "run.seed=2"], "--set: run.seed: given twice, as 1 and as 2: keep one"),
        (["lr=1e-3"], "--set: lr: 'lr=...' names no section. Did you mean 'optimizer.lr'? (allowed: section.key"),
        (["x1=1"], "--set: x1: 'x1=...' names no section (allowed: section.key=value)"),
        (["run.seed"], "--set: 'run.seed' is no setting (allowed: section.key=value)"),
        (["run.sed=1"], "--set: run.sed: unknown key (value 1). Did you mean 'run.seed'?"),
        (["data.train=[]"], "--set: data.train: this key is required here: token files to train on"),
        (["lr.warmup_steps=2000"], "--set: lr.warmup_steps: a warm-up of 2000 steps is longer than the run (run.steps"),
        (["run.steps=5"], "run.toml: lr.warmup_steps: a warm-up of 10 steps is longer than the run (run.steps = 5)"),
    ],
)
def test_train_refuses_settings(capsys, monkeypatch, tmp_path, settings, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(GOOD)
    arguments = [part for setting in settings for part in ("--set", setting)]
    assert refusal(capsys, monkeypatch, "train", "run.toml", *arguments).startswith(text)


@pytest.mark.parametrize("resume", ["", "x" * 256, "a\nb"])
def test_a_resume_that_is_no_path(capsys, monkeypatch, tmp_path, resume):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(GOOD)
    text = refusal(capsys, monkeypatch, "train", "run.toml", "--resume", resume)
    assert text.startswith("--resume: run.resume: ")
    assert text.endswith("(allowed: auto, never, or a path)")


@pytest.mark.parametrize(("verb", "needed"), [("train", "train"), ("eval", "validation")])
def test_a_wrong_number_of_ranks_repeats_the_command_and_hides_no_other_fault(
    capsys, monkeypatch, tmp_path, verb, needed
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE + '[pipeline]\nranks = 4\nschedule = "gpip"\n')
    given = ["--set", "run.name=a b", "--set", "run.seed=3", "--resume", "never"]
    assert one_rank(monkeypatch, verb, "run.toml", *given) == 2
    said = capsys.readouterr().err
    command = f"mpirun -n 4 mpipipe {verb} run.toml --set 'run.name=a b' --set run.seed=3 --resume never"
    assert f"the launch has 1 (MPI world size 1): start '{command}', or remove pipeline.ranks" in said
    assert f"run.toml: data.{needed}: this key is required here" in said
    assert "run.toml: pipeline.schedule: \"gpip\" is no schedule. Did you mean 'gpipe'?" in said
    assert said.count("error: ") == 1


@pytest.mark.parametrize("verb", ["train", "eval", "plan"])
def test_a_run_folder_in_place_of_its_run_file(capsys, monkeypatch, tmp_path, verb):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(GOOD)
    text = refusal(capsys, monkeypatch, verb, "run")
    assert text == "run: is a directory, a run folder; its run file is run/config.toml (allowed: run/config.toml)"


def test_a_run_of_a_scripts_layers_has_no_plan(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("[batch]\nsequences = 4\n")
    text = refusal(capsys, monkeypatch, "plan", "run.toml", "--ranks", "2")
    assert text.startswith("run.toml: model: this section is required here: ")
    assert text.endswith("A run whose layers come from a script has none, and this verb can't know them")
