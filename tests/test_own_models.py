"""The scripts of docs/own_models.md, as they stand: on one rank and on ranks of this process."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import little
import pytest
import torch
from torch import nn

from mpipipe.transport import Transport, run_ranks, solo

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = (REPOSITORY / "docs" / "own_models.md").read_text(encoding="utf-8")
FENCED = re.compile(
    r"^`(\w+\.\w+)`[^\n]*?(?:\n[^`\n][^\n]*)*\n\n```(?:python|toml)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
FILES = dict(FENCED.findall(PAGE))
SCRIPTS = ("images.py", "packed.py", "tied.py")
CUTS = ((2, "1f1b", 1), (2, "zb-v", 2), (4, "gpipe", 1))


def test_every_block_of_the_page_is_run_here() -> None:
    assert tuple(FILES) == ("own.toml", *SCRIPTS)
    assert PAGE.count("```python\n") == len(SCRIPTS)
    assert PAGE.count("```toml\n") == 1


def folder_with(script: str, folder: Path, run_file: str | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "own.toml").write_text(run_file or FILES["own.toml"], encoding="utf-8")
    (folder / script).write_text(FILES[script], encoding="utf-8")
    return folder


def start(script: str, folder: Path) -> str:
    """``python SCRIPT`` in a folder; what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); exec(open({script!r}).read())"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def figures(printed: str) -> tuple[int, int, float]:
    """Step it began at, step it ended at, loss of the evaluation."""
    (line,) = printed.splitlines()
    begin, end, loss = line.split()
    return int(begin), int(end), float(loss)


def run_here(script: str, folder: Path, p: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """The script on p ranks of this process: each thread has its own transport."""
    mine = threading.local()
    monkeypatch.setattr("mpipipe.trainer.trainer.open_or_end", lambda: mine.transport)
    monkeypatch.chdir(folder)
    code = compile(FILES[script], script, "exec")

    def rank(transport: Transport) -> None:
        mine.transport = transport
        exec(code, {"__name__": "__main__"})

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_ranks(p, rank) if p > 1 else rank(solo())
    return printed.getvalue()


@functools.cache
def alone(script: str, folder: Path) -> str:
    return start(script, folder_with(script, folder))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own")


UNTRAINED = {"images.py": 1.0, "packed.py": 1.9, "tied.py": 2.6}
"""Below the entropy of the labels, nats an item: log 3, log 8, log 16."""


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_learns_saves_and_is_done_at_its_second_start(script: str, shared: Path) -> None:
    folder = shared / script.removesuffix(".py")
    first = figures(alone(script, folder))
    assert first[:2] == (0, 60)
    assert first[2] < 0.7 * UNTRAINED[script]
    saved = sorted(path.name for path in (folder / "runs" / script.removesuffix(".py") / "checkpoints").iterdir())
    assert saved == ["step-00000030", "step-00000060"]
    assert figures(start(script, folder)) == (60, 60, first[2])


@pytest.mark.parametrize(("p", "schedule", "chunks"), CUTS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_gives_the_same_numbers_on_other_ranks(
    script: str, p: int, schedule: str, chunks: int, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the start; and from the checkpoint at step 30 of two ranks."""
    expected = figures(alone(script, shared / script.removesuffix(".py")))
    run_file = FILES["own.toml"].replace('schedule = "1f1b"', f'schedule = "{schedule}"\nchunks = {chunks}')
    assert run_file != FILES["own.toml"]
    half = run_file.replace("steps = 60", "steps = 30", 1)
    folder_with(script, tmp_path, half)
    assert figures(run_here(script, tmp_path, p, monkeypatch))[:2] == (0, 30)
    folder_with(script, tmp_path)
    assert figures(run_here(script, tmp_path, 3 - min(p, 2), monkeypatch)) == (30, 60, expected[2])


def test_the_tied_weight_is_in_a_checkpoint_once(shared: Path) -> None:
    from mpipipe.formats.checkpoint import read_manifest

    alone("tied.py", shared / "tied")
    manifest = read_manifest(shared / "tied" / "runs" / "tied" / "checkpoints" / "step-00000060")
    names = list(manifest.tensors)
    assert (
        len([name for name in names if name.endswith(".weight") and "0.weight" in name]) == 3
    )  # value and two moments
    assert not [name for name in names if name.endswith("/3.weight")]


def test_the_error_that_is_shown_is_the_one_that_is_made() -> None:
    (shown,) = re.findall(r"^```\n(RuntimeError: .*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    layers = [lambda: nn.Linear(16, 16), nn.ReLU, lambda: nn.Linear(16, 16), lambda: nn.Linear(32, 3)]
    with pytest.raises(RuntimeError) as caught:
        little.train_on(2, lambda: layers, little.config(sequences=32, microbatch=8), [little.batch(0, 32, 16)])
    assert shown.splitlines() == [f"RuntimeError: {caught.value}", *caught.value.__notes__]


def test_numbers_do_not_hang_on_torch_s_own_generator(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = figures(alone("tied.py", shared / "tied"))
    torch.manual_seed(99)
    folder_with("tied.py", tmp_path)
    assert figures(run_here("tied.py", tmp_path, 1, monkeypatch)) == expected
