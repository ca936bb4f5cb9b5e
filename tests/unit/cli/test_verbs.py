"""The verbs that need neither torch nor MPI, their outputs and exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mpipipe
from mpipipe.cli import main
from mpipipe.cli.schedule_costs import parse_costs
from mpipipe.data import find_files
from mpipipe.errors import ConfigError

BLOCKED = "import sys\nfor name in ('torch', 'mpi4py', 'cupy'): sys.modules[name] = None\n"
LAUNCHER_VARIABLES = (
    "PMI_RANK",
    "PMI_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "SLURM_STEP_ID",
    "PMIX_RANK",
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def run_python(code, cwd=None):
    """Python code in a process of its own that finds this mpipipe."""
    paths = [str(Path(mpipipe.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, timeout=60, env=environ
    )


def run_blocked(*arguments, cwd=None):
    """A verb in a process where torch, mpi4py and cupy can't be imported."""
    code = f"{BLOCKED}from mpipipe.cli import main\nsys.exit(main({list(arguments)!r}))"
    return run_python(code, cwd)


def json_of(capsys, *arguments, code=0):
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom mpipipe.cli import main\nassert main(['--help']) == 0\n"
        "heavy = {'torch', 'mpi4py', 'numpy', 'h5py', 'pydantic', 'rich', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    for verb in ("train", "eval", "generate", "plan", "schedule", "trace", "checkpoint", "data", "doctor"):
        assert f"\n  {verb} " in done.stdout


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mpipipe {mpipipe.__version__}\n"


@pytest.mark.parametrize(
    "arguments", [["nope"], ["schedule", "show"], ["schedule", "show", "1f1b", "-p", "0"], ["train", "--x"]]
)
def test_usage_errors(capsys, arguments):
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "Error: " in said.err
    error = json_of(capsys, *arguments, code=2)["error"]
    assert error["type"] == "UsageError"
    assert set(error) == {"type", "message", "key", "allowed"}


def test_usage_error_is_printed_by_the_launchers_first_rank_only(capsys, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "1")
    assert main(["nope"]) == 2
    said = capsys.readouterr()
    assert said.out + said.err == ""


def test_schedule_list(capsys):
    assert main(["schedule", "list"]) == 0
    loops = "naive gpipe 1f1b eager-1f1b interleaved looped-bfs zb-h1 zb-h2 interleaved-zb"
    turning = "zb-v v-half v-min dualpipe-v dualpipe chimera hanayo"
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == f"{loops} {turning}".split()
    assert all(len(line.split()) > 5 for line in lines)
    assert json_of(capsys, "schedule", "list")["schedules"] == f"{loops} {turning}".split()


def test_schedule_show_json(capsys):
    found = json_of(capsys, "schedule", "show", "1f1b", "-p", "4", "-m", "8")
    assert (found["schedule"], found["p"], found["v"], found["m"], found["stages"]) == ("1f1b", 4, 1, 8, 4)
    assert found["makespan"] == 33
    assert found["bubble_fraction"] == pytest.approx(3 / 11)
    assert found["peak_activations"] == [4, 3, 2, 1]
    assert found["messages"] == 48
    assert found["placement"] == [0, 1, 2, 3]
    assert found["costs"] == {"F": 1, "I": 1, "W": 1}


def test_schedule_show_costs_and_latency(capsys):
    found = json_of(capsys, "schedule", "show", "gpipe", "-p2", "-m1", "--cost", "F=2,W=0", "--latency", "0.5")
    assert found["costs"] == {"F": 2, "I": 1, "W": 0}
    assert found["makespan"] == 2 * 2 + 2 * 1 + 2 * 0.5


@pytest.mark.parametrize("text", ["F", "F=", "F=x", "X=1", "F=-1", "F=inf", "F=nan", "F=1,,W=1"])
def test_costs_that_are_none(text):
    with pytest.raises(ConfigError, match="is no cost"):
        parse_costs(text)


def test_schedule_refusals_are_exit_2_and_draw_nothing(capsys, tmp_path):
    picture = tmp_path / "a.png"
    error = json_of(capsys, "schedule", "show", "1f1b", "-v", "2", "-o", str(picture), code=2)["error"]
    assert "interleaved" in error["message"]
    assert not picture.exists()
    assert main(["schedule", "show", "1f1bb"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")


def test_schedule_files(capsys, tmp_path):
    rows = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    for ending, check in {
        "csv": lambda text: text.endswith(rows) and text.startswith("# format = mpipipe-schedule\n# version = 1\n"),
        "json": lambda text: json.loads(text)["rows"][1] == ["1F0", "1B0", "1F1", "1B1"],
        "txt": lambda text: text.startswith("rank 0 | F0 F1"),
    }.items():
        path = tmp_path / f"table.{ending}"
        assert main(["schedule", "show", "1f1b", "-p", "2", "-m", "2", "-o", str(path)]) == 0
        assert check(path.read_text()), path.read_text()
        assert capsys.readouterr().out == f"{path}\n"
    assert main(["schedule", "show", "1f1b", "-o", str(tmp_path / "b.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] == str(tmp_path / "b.json")
    assert main(["schedule", "show", "1f1b", "-p", "2", "-m", "2", "--format", "torch-csv"]) == 0
    assert capsys.readouterr().out == rows


def test_schedule_picture(tmp_path):
    path = tmp_path / "table.png"
    assert main(["schedule", "show", "1f1b", "-p", "2", "-m", "2", "-o", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["-o", "table.odd"], "-o"),
        (["--format", "png"], "-o"),
        (["--format", "csv"], "--format"),
        (["-o", "no/such/folder/a.csv"], "-o"),
    ],
)
def test_schedule_outputs_that_are_none(capsys, tmp_path, monkeypatch, arguments, key):
    monkeypatch.chdir(tmp_path)
    json_flag = ["--json"] if "--format" in arguments and "csv" in arguments else []
    assert main(["schedule", "show", "1f1b", *arguments, *json_flag]) == 2
    said = capsys.readouterr()
    assert key in said.out + said.err


def test_data_build_and_info(capsys, tmp_path):
    for name, text in {"a.txt": "hello", "b.txt": "worlds", "c/d.txt": "!", "c/.hidden": "no"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    tokens, held = tmp_path / "t.h5", tmp_path / "v.h5"
    arguments = ["data", "build", f"{tmp_path}/*.txt", f"{tmp_path}/c", "-o", str(tokens)]
    built = json_of(capsys, *arguments, "--validation", str(held), "--validation-every", "3")
    assert (built["train"]["tokens"], built["train"]["documents"], built["train"]["vocab"]) == (11, 2, 256)
    assert (built["validation"]["tokens"], built["validation"]["sources"][0]["path"]) == (
        1,
        str(tmp_path / "c" / "d.txt"),
    )
    assert json_of(capsys, "data", "info", str(tokens)) == built["train"]
    assert main(["data", "info", str(held)]) == 0
    assert "1 token of 1 document, stored as uint16" in capsys.readouterr().out
    assert main([*arguments]) == 2
    assert "exists; choose another name, or --overwrite" in capsys.readouterr().err


def test_data_build_refuses_what_is_no_text(capsys, tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "b.bin").write_bytes(b"\0\1")
    arguments = ["data", "build", str(tmp_path), "-o", str(tmp_path.parent / "t.h5"), "--overwrite"]
    assert main(arguments) == 2
    assert "b.bin is no text: it holds a NUL byte. Leave it out" in capsys.readouterr().err
    assert json_of(capsys, *arguments, "--exclude", "b.bin")["train"]["tokens"] == 5
    assert json_of(capsys, *arguments, "--binary")["train"]["tokens"] == 7


def test_files_of_a_list(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.txt").write_text("c")
    assert find_files([str(tmp_path), str(tmp_path / "a.txt")]) == [tmp_path / "a.txt", tmp_path / "b" / "c.txt"]
    assert find_files([f"{tmp_path}/**/*.txt"]) == [tmp_path / "a.txt", tmp_path / "b" / "c.txt"]
    for missing in ("none.txt", f"{tmp_path}/*.md"):
        with pytest.raises(ConfigError, match=f"^{re.escape(missing)} names no file"):
            find_files([missing])


def test_checkpoint_list_and_show_of_nothing(capsys, tmp_path):
    error = json_of(capsys, "checkpoint", "list", str(tmp_path), code=2)["error"]
    assert f"{tmp_path} is no run folder: it has no checkpoints, no config.toml and no status.json" in error["message"]
    assert json_of(capsys, "checkpoint", "show", str(tmp_path), code=2)["error"]["message"] == error["message"]
    (tmp_path / "config.toml").write_text("")
    assert json_of(capsys, "checkpoint", "list", str(tmp_path))["checkpoints"] == []
    assert "no usable checkpoint" in json_of(capsys, "checkpoint", "show", str(tmp_path), code=2)["error"]["message"]
    assert (
        json_of(capsys, "checkpoint", "list", str(tmp_path / "none"), code=2)["error"]["type"]
        == "CheckpointNotFoundError"
    )


def test_checkpoint_list_and_show(capsys, tmp_path):
    import numpy as np

    from mpipipe.formats import checkpoint as files
    from mpipipe.formats.paths import RunPaths

    paths = RunPaths(tmp_path)
    folder = paths.checkpoint(7)
    folder.mkdir(parents=True)
    shard = folder / files.shard_name(0)
    names = ("/parameters/w", "/optimizer/exp_avg/w", "/optimizer/exp_avg_sq/w", "/buffers/b")
    entries = files.write_shard(shard, {name: np.ones((2, 3), np.float32) for name in names})
    manifest = files.make_manifest(7, {shard.name: shard.stat().st_size}, entries, {}, {"seed": 5}, "")
    master = files.write_master(folder, manifest)
    sizes = {path.name: path.stat().st_size for path in (shard, master)}
    files.write_manifest(folder, files.make_manifest(7, sizes, entries, {}, {"seed": 5}, ""))
    paths.checkpoint(8).mkdir()
    good, bad = json_of(capsys, "checkpoint", "list", str(tmp_path))["checkpoints"]
    assert (good["step"], good["complete"], good["bytes"]) == (7, True, sum(sizes.values()))
    assert (bad["step"], bad["complete"], bad["bytes"]) == (8, False, None)
    assert bad["problem"]
    shown = json_of(capsys, "checkpoint", "show", str(tmp_path))
    assert shown["step"] == 7
    assert shown["scalars"] == {"seed": 5}
    assert set(shown["tensors"]) == set(names)
    assert shown["tensors"]["/parameters/w"]["shape"] == [2, 3]
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "show", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "seed = 5",
        "tensor         type     shape",
        "/parameters/w  float32    2x3",
        "/buffers: 1 tensor, 24 B; --all lists them",
        "/optimizer: 2 tensors, 48 B; --all lists them",
    ]
    assert main(["checkpoint", "show", str(folder), "--all"]) == 0
    assert capsys.readouterr().out.count("  float32    2x3  shard-0000.h5\n") == 4
    assert main(["checkpoint", "show", str(tmp_path), "--step", "8"]) != 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["schedule", "list"],
        ["schedule", "show", "interleaved", "-p", "2", "-m", "4", "-v", "2", "--json"],
        ["checkpoint", "list", "."],
        ["data", "build", "a.txt", "-o", "t.h5"],
    ],
)
def test_verbs_without_torch_and_mpi(tmp_path, arguments):
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "status.json").write_text("{}")
    done = run_blocked(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", ["train", "eval", "generate"])
def test_verbs_that_need_torch_say_so(tmp_path, verb):
    (tmp_path / "a.toml").write_text("")
    extra = ["--prompt", "x"] if verb == "generate" else []
    done = run_blocked(verb, "a.toml", *extra, "--json", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["type"] == "MissingDependencyError"
    assert "pip install 'mpipipe[train" in error["message"]


def test_doctor_without_torch_and_mpi(tmp_path):
    absent = "{'torch', 'mpi4py', 'cupy', 'cupy-cuda12x', 'cupy-cuda13x'}"
    code = (
        f"{BLOCKED}from mpipipe import environment\nfrom mpipipe.cli import main\nversion = environment._version\n"
        f"environment._version = lambda package: None if package in {absent} else version(package)\n"
        "sys.exit(main(['doctor', '--json']))"
    )
    done = run_python(code, tmp_path)
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    levels = {verdict["subject"]: verdict["level"] for verdict in report["verdicts"]}
    assert (levels["torch"], levels["mpi4py"], levels["MPI"]) == ("missing", "missing", "missing")
    assert levels["file locks"] == "ok"
    assert report["ok"]


RUN_FILE = "[model]\nlayers = 8\nhidden = 32\nheads = 4\nsequence = 16\n[batch]\nsequences = 16\n"


def test_plan(capsys, tmp_path):
    run_file = tmp_path / "a.toml"
    run_file.write_text(RUN_FILE)
    found = json_of(capsys, "plan", str(run_file), "--ranks", "4", "--set", "pipeline.partition=even")
    assert (found["ranks"], found["microbatches"], found["partition"]) == (4, 16, [2, 2, 2, 2])
    assert found["peak_activations"] == [4, 3, 2, 1]
    assert found["advice"] == []
    assert main(["plan", str(run_file), "--ranks", "2"]) == 0
    assert "schedule 1f1b: 2 ranks" in capsys.readouterr().out


def test_plan_takes_the_run_files_ranks_unless_told(capsys, tmp_path):
    run_file = tmp_path / "a.toml"
    run_file.write_text(RUN_FILE + "[pipeline]\nranks = 2\n")
    assert json_of(capsys, "plan", str(run_file))["ranks"] == 2
    assert json_of(capsys, "plan", str(run_file), "--ranks", "4")["ranks"] == 4


def test_plan_for_other_ranks_takes_no_offence_at_those_of_the_file(capsys, tmp_path):
    """A file for more ranks than the model has layers, planned for fewer."""
    run_file = tmp_path / "a.toml"
    run_file.write_text(RUN_FILE + "[pipeline]\nranks = 16\n")
    assert json_of(capsys, "plan", str(run_file), "--ranks", "2")["ranks"] == 2


def test_plan_refusals(capsys, tmp_path):
    run_file = tmp_path / "a.toml"
    run_file.write_text(RUN_FILE)
    for arguments, key in (
        ([], "pipeline.ranks"),
        (["--ranks", "9"], "pipeline.ranks"),
        (["--ranks", "4", "--set", "pipeline.chunks=3"], "pipeline.chunks"),
        (["--ranks", "4", "--set", "model.layer=3"], "model.layer"),
    ):
        error = json_of(capsys, "plan", str(run_file), *arguments, code=2)["error"]
        assert error["key"] == key
        assert main(["plan", str(run_file), *arguments]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("error: ")
    assert main(["plan", str(run_file)]) == 2
    said = capsys.readouterr().err
    assert said == (
        f"error: {run_file}: pipeline.ranks is not set, so the number of ranks is not known: "
        "give --ranks N, or set pipeline.ranks\n"
    )


def test_plan_without_torch_and_mpi(tmp_path):
    (tmp_path / "a.toml").write_text(RUN_FILE)
    done = run_blocked("plan", "a.toml", "--ranks", "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
