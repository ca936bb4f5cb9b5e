"""Checkpoints that move to another cut, and run files with mistakes in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny

from mpipipe.cli.ranks import on_ranks
from mpipipe.cli.train import prepare_config
from mpipipe.formats.checkpoint import read_manifest
from mpipipe.formats.paths import RunPaths
from mpipipe.transport import Transport, run_ranks

LAYOUTS = [(1, 1), (2, 1), (4, 1), (2, 3), (3, 2)]
"""(ranks, chunks)."""


def go_on(p: int, chunks: int, run_dir: Path, first: int, last: int) -> tuple[int, list[str]]:
    """Train from step ``first`` to ``last`` and save: how many tensors the checkpoint has, and "name checksum" of
    each.
    """
    schedule = "interleaved" if chunks > 1 else "1f1b"
    config = tiny.config(run_dir=str(run_dir), schedule=schedule, chunks=chunks, trace__enabled=False)

    def work(transport: Transport) -> None:
        with tiny.trainer(config, transport) as made:
            assert made.restore() == first
            for data in tiny.batches(config, first, last):
                made.step(data)
            made.save()

    run_ranks(p, work)
    tensors = read_manifest(RunPaths(run_dir).checkpoint(last)).tensors
    return len(tensors), sorted(f"{name} {entry.checksum}" for name, entry in tensors.items())


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, list[str]]]:
    """Steps 3 and 6 of a run on one rank."""
    folder = tmp_path_factory.mktemp("reference")
    return [go_on(1, 1, folder, 0, 3), go_on(1, 1, folder, 3, 6)]


def test_a_checkpoint_holds_every_layer_once_under_its_own_number(reference: list[tuple[int, list[str]]]) -> None:
    """As reported: stages counted their layers from 0, and in the order of text 10 came before 9."""
    count, rows = reference[0]
    per_block = [name for name in (row.split()[0] for row in rows) if name.startswith("/parameters/blocks.")]
    blocks = {int(name.split(".")[1]) for name in per_block}
    assert blocks == set(range(12))
    assert len(per_block) == len(set(per_block)) == 12 * 12
    assert count == 3 * (2 + 12 * 12 + 2)  # embedding, blocks, the head's norm; the tied head is no tensor of its own


@pytest.mark.parametrize("p, chunks", LAYOUTS)
def test_no_chunk_overwrites_another_s_parameters(
    p: int, chunks: int, reference: list[tuple[int, list[str]]], tmp_path: Path
) -> None:
    """As reported: with several chunks a rank, only half of the parameters were in the saved set."""
    assert go_on(p, chunks, tmp_path, 0, 3) == reference[0]


@pytest.fixture(scope="module")
def saved_by_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    go_on(4, 1, folder, 0, 3)
    return folder


@pytest.mark.parametrize("p, chunks", LAYOUTS)
def test_saved_by_four_ranks_and_gone_on_in_any_layout(
    p: int, chunks: int, reference: list[tuple[int, list[str]]], saved_by_four: Path, tmp_path: Path
) -> None:
    """As reported: the optimizer's state could not move to another number of ranks. 12 layers, three more steps,
    every parameter and moment as if nothing had changed.
    """
    folder = RunPaths(tmp_path).checkpoints
    folder.mkdir()
    (folder / "step-00000003").symlink_to(RunPaths(saved_by_four).checkpoint(3))
    assert go_on(p, chunks, tmp_path, 3, 6) == reference[1]


MODEL = "[model]\nlayers = 4\nhidden = 8\nheads = 2\nsequence = 4\n"
MISTAKES = {
    "[batch]\nmicrobatchs = 2\n": ("batch.microbatchs", "batch.microbatch"),
    "[optimizer]\nlearning_rat = 1e-4\n": ("optimizer.learning_rat", "optimizer.lr"),
    "[model.deep]\nlayers = 3\n": ("model.deep", ""),
    "[pipeline]\nlr = 1e-4\n": ("pipeline.lr", "optimizer.lr"),
    '[optimizer]\nlr = "1e-4"\n': ("optimizer.lr", "drop the quotes"),
    "[optimizer]\nlr = -1e-4\n": ("optimizer.lr", "above 0"),
    "[batch]\nsequences = 0\n": ("batch.sequences", "at least 1"),
    "[batch]\nmicrobatch = 0\n": ("batch.microbatch", "at least 1"),
    "[pipeline]\nranks = 4\n": ("pipeline.ranks", "asks for 4 ranks, the launch has {p}"),
}


@pytest.mark.parametrize("p", [3, 8])
@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_in_the_run_file_is_told_once_and_ends_all_ranks(
    text: str, p: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As reported: a misspelt key was dropped in silence, and the loss curve told of it hours later; a wrong number of
    ranks was told with a product that nobody had written. One message, by one rank, in the user's words.
    """
    key, words = MISTAKES[text]
    run_file = tmp_path / "a.toml"
    run_file.write_text((MODEL if "ranks" not in text else MODEL.replace("= 4", "= 8", 1)) + text)

    def work(config: object, transport: object) -> int:
        raise AssertionError("nothing may start")

    def launch(transport: Transport) -> int:
        return on_ranks(
            lambda ranks: prepare_config(run_file, [], ranks), work, as_json=True, open_world=lambda: transport
        )

    assert run_ranks(p, launch) == [2] * p
    said = capsys.readouterr()
    error = json.loads(said.out)["error"]
    assert error["key"] == key
    assert words.format(p=p) in f"{error['message']} {error['allowed']}"
    assert said.err == ""
