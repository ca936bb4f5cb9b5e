"""A script's trainer keeps its run folder for itself from the first thing that it writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import little
import pytest

from mpipipe.errors import ConfigError
from mpipipe.lifecycle import RunLock
from mpipipe.trainer import Trainer
from mpipipe.transport import Transport, run_ranks, solo

HOLDS = """
import sys
from mpipipe.lifecycle import RunLock
from pathlib import Path
print(RunLock(Path(sys.argv[1]) / ".lock").acquire(), flush=True)
sys.stdin.read()
"""


def trainer_of(folder: Path, transport: Transport, **keys: object) -> Trainer:
    config = little.config(run_dir=str(folder), **keys)
    return Trainer(config, [little.linear(), little.linear()], little.square_loss, transport=transport)


@pytest.mark.parametrize("traced", [False, True])
def test_a_folder_that_another_launch_writes_to_is_refused(traced: bool, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "None\n"

        def work(transport: Transport) -> None:
            trainer = trainer_of(tmp_path, transport, trace__enabled=traced)
            trainer.step(little.batch(0))
            trainer.save()

        with pytest.raises(ConfigError, match=rf"another launch is writing to .*process {other.pid}"):
            run_ranks(2, work)
        other.communicate("")
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    run_ranks(2, work)


def test_a_trainer_that_writes_nothing_takes_no_folder(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run", solo())
    trainer.step(little.batch(0))
    trainer.close()
    assert not (tmp_path / "run").exists()


def test_two_trainers_of_one_process_share_a_folder_and_a_closed_one_leaves_it(tmp_path: Path) -> None:
    """As before and after a restore in one script."""
    first = trainer_of(tmp_path, solo())
    first.step(little.batch(0))
    first.save()
    second = trainer_of(tmp_path, solo())
    assert second.restore() == 1
    second.step(little.batch(1))
    second.save()
    first.close()
    second.close()
    alone = RunLock(tmp_path / ".lock")
    assert alone.acquire() is None
    alone.release()
