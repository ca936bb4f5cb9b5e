"""``mpipipe bench`` over MPI: one object from rank 0, a refusal told once, nothing left behind."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from launch import launch

pytestmark = pytest.mark.mpi


def bench(num_ranks: int, folder: Path, *arguments: str) -> tuple[int, str, str]:
    with tempfile.TemporaryDirectory(prefix="b-") as temporary:  # a short name: Open MPI makes sockets below it
        ended = launch(num_ranks, "-m", "mpipipe", "bench", *arguments, timeout=120, cwd=folder, TMPDIR=temporary)
        assert not list(Path(temporary).glob("mpipipe-bench-*"))
    return ended.returncode, ended.stdout, ended.stderr


def test_messages_between_three_ranks(tmp_path: Path) -> None:
    code, out, errors = bench(3, tmp_path, "p2p", "--sizes", "8,100KiB,2MiB", "--repeats", "4", "--json")
    assert code == 0, errors
    found = json.loads(out)
    assert [(row["rank"], row["message_bytes"]) for row in found["pairs"]] == [
        (rank, nbytes) for rank in (0, 1) for nbytes in (8, 102400, 2 << 20)
    ]
    assert "MPI" in found["library"]


def test_one_rank_is_refused_and_a_wrong_size_is_told_once(tmp_path: Path) -> None:
    code, out, errors = bench(1, tmp_path, "p2p")
    assert (code, out) == (2, "")
    assert "mpirun -n 2 mpipipe bench p2p" in errors
    code, out, errors = bench(2, tmp_path, "p2p", "--sizes", "8,many")
    assert code == 2
    assert errors.count("--sizes: 'many' is no size of a message") == 1


def test_the_engine_on_two_ranks(tmp_path: Path) -> None:
    code, out, errors = bench(2, tmp_path, "engine", "--schedule", "interleaved", "--chunks", "2", "-m", "4", "--json",
                              "--steps", "3")  # fmt: skip
    assert code == 0, errors
    found = json.loads(out)
    assert (found["schedule"], found["v"], found["actions_per_rank"]) == ("interleaved", 2, 16)
    assert found["kinds"]["F"]["events_per_step"] == found["kinds"]["B"]["events_per_step"] == 8
    assert list(tmp_path.iterdir()) == []
