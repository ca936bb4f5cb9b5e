"""Tokens on their way to the first and the last rank: what was reported of samples, labels, ids and small data sets."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from mpipipe.checkpoint import load
from mpipipe.errors import DataError
from mpipipe.formats.paths import RunPaths
from mpipipe.formats.tokens import write_tokens
from mpipipe.model import Embedding, token_loss
from mpipipe.trainer import TrainOutcome, eval_run, train_run
from mpipipe.transport import run_ranks

T = tiny.SEQUENCE
WINDOWS = 11


class Seen:
    """What the embedding reads and what the loss compares with, by sample: (ids, labels) in the order they come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ids: list[int] = []
        self.labels: list[int] = []
        forward = Embedding.forward

        def reads(layer: Embedding, x: torch.Tensor, draw: object = None) -> torch.Tensor:
            self.ids += x[:, 0].tolist()
            return forward(layer, x, draw)  # type: ignore[arg-type]

        def compares(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, object]:
            self.labels += target[:, 0].tolist()
            return token_loss(output, target)

        monkeypatch.setattr(Embedding, "forward", reads)
        monkeypatch.setattr("mpipipe.trainer.run.token_loss", compares)

    def take(self) -> list[int]:
        assert self.ids == self.labels
        found, self.ids, self.labels = self.ids, [], []
        return found


def run(p: int, run_dir: Path, train: list[str], steps: int, **keys: object) -> TrainOutcome:
    settings: dict[str, object] = {
        "model__layers": 4,
        "model__dropout": 0.0,
        "sequences": 4,
        "lr__schedule": "constant",
        "lr__warmup_steps": 0,
        **keys,
    }
    config = tiny.config(run_dir=str(run_dir), run__steps=steps, data__train=train, trace__enabled=False, **settings)
    return run_ranks(p, lambda transport: train_run(config, transport))[0]


@pytest.fixture
def numbered(tmp_path: Path) -> str:
    """A file whose window k holds nothing but the token k."""
    tokens = np.repeat(np.arange(WINDOWS + 1), T)[: WINDOWS * T + 1]
    write_tokens(tmp_path / "numbered.h5", [tokens], tiny.VOCAB, "none")
    return str(tmp_path / "numbered.h5")


def test_first_and_last_rank_look_at_the_same_samples(
    numbered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As reported: the first stage's loader and the last stage's shuffled apart, and so did they after a resume. The
    number of each sample is in its tokens; nine steps of four are more than three epochs.
    """
    seen = Seen(monkeypatch)
    run(4, tmp_path / "whole", [numbered], 9)
    whole = seen.take()
    run(4, tmp_path / "cut", [numbered], 5)
    before = seen.take()
    run(2, tmp_path / "cut", [numbered], 9, pipeline__schedule="interleaved", pipeline__chunks=2)
    assert before + seen.take() == whole
    epochs = [whole[start : start + WINDOWS] for start in range(0, 3 * WINDOWS, WINDOWS)]
    assert all(sorted(epoch) == list(range(WINDOWS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, range(WINDOWS)]}) == 4, "each epoch in an order of its own"


def test_ids_of_a_vocabulary_of_70000_reach_their_rows(tmp_path: Path) -> None:
    """As reported: ids above 65,535 wrapped around in 16 bits, and the model trained on other words. Only the rows of
    ids that are in the file have a gradient.
    """
    ids = np.random.default_rng(0).permutation(np.arange(65_536, 70_000))[: 8 * T + 1]
    ids[-1] = 69_999
    write_tokens(tmp_path / "a.h5", [ids], 70_000, "none")
    keys = {"model__vocab": 70_000, "model__layers": 2, "model__hidden": 8, "model__tie_embeddings": False}
    outcome = run(2, tmp_path / "run", [str(tmp_path / "a.h5")], 2, **keys)
    assert outcome.loss == pytest.approx(math.log(70_000), rel=1e-2)
    name = "/optimizer/exp_avg/embedding.tokens.weight"
    moments = load(RunPaths(tmp_path / "run").checkpoint(2), [name]).tensors[name]
    assert sorted(np.flatnonzero(np.abs(moments).sum(1))) == sorted(ids[:-1])


@pytest.mark.parametrize("bad", [tiny.VOCAB, -1])
def test_a_wrong_id_ends_the_run_and_not_the_kernel(bad: int, tmp_path: Path) -> None:
    """As reported: an id outside of the vocabulary was an assertion of a GPU kernel far from its cause, or an index
    error on one rank while the others waited. The last token of the file, which is only ever a label.
    """
    import h5py

    path = tmp_path / "a.h5"
    tokens = np.arange(4 * T + 1) % tiny.VOCAB
    write_tokens(path, [tokens], tiny.VOCAB, "none")
    tokens[-1] = bad
    with h5py.File(path, "r+") as file:
        del file["tokens"]
        file["tokens"] = tokens
    words = rf"data\.train: .*a\.h5, position {4 * T}: token id {bad} is outside 0 to 100 \(model\.vocab = 101\)"
    for p in (1, 3):
        with pytest.raises(DataError, match=words):
            run(p, tmp_path / f"run{p}", [str(path)], 2)
        assert json.loads((tmp_path / f"run{p}" / "status.json").read_text())["state"] == "failed"


@pytest.mark.parametrize("p", [1, 3])
@pytest.mark.parametrize("windows", [1, 3, 4, 5])
def test_a_data_set_smaller_than_a_batch_still_trains(windows: int, p: int, tmp_path: Path) -> None:
    """As reported: with fewer samples than a batch there was no step at all, and the run ended as a success. B = 4 over
    1, B - 1, B and B + 1 windows, one step more than an epoch holds: every step updates, and goes on around.
    """
    write_tokens(tmp_path / "a.h5", [np.arange(windows * T + 1) % tiny.VOCAB], tiny.VOCAB, "none")
    steps = windows // 4 + 1
    outcome = run(p, tmp_path / "run", [str(tmp_path / "a.h5")], steps)
    lines = [json.loads(line) for line in RunPaths(tmp_path / "run").metrics.read_text().splitlines()]
    assert (outcome.exit_code, outcome.step, outcome.skipped_steps) == (0, steps, 0)
    assert [(line["step"], line["tokens"]) for line in lines] == [(k + 1, 4 * T) for k in range(steps)]
    assert all(line["grad_norm"] > 0 for line in lines)
    scalars = load(RunPaths(tmp_path / "run").checkpoint(steps), []).scalars
    assert (scalars["updates"], scalars["samples_seen"]) == (steps, 4 * steps)


@pytest.mark.parametrize("count", [1, T])
def test_a_file_without_a_window_is_no_success(count: int, tmp_path: Path) -> None:
    """As reported: a file shorter than one block gave nothing, length minus window underflowed, and the run was "done".
    Alone, and among good files; nothing is left in the run folder.
    """
    for name, length in (("short", count), ("good", 5 * T)):
        write_tokens(tmp_path / f"{name}.h5", [np.ones(length, dtype=np.int64)], tiny.VOCAB, "none")
    good, short = str(tmp_path / "good.h5"), str(tmp_path / "short.h5")
    for files in ([short], [good, short]):
        with pytest.raises(DataError, match=rf"short\.h5 has {count} tokens, less than one window"):
            run(2, tmp_path / "run", files, 2)
    assert not (tmp_path / "run").exists()


def test_an_evaluation_weighs_tokens_and_not_batches(numbered: str, tmp_path: Path) -> None:
    """As reported: validation was a mean of batch means, so that a short last batch counted too much. 11 windows in
    batches of 4, 3 and 8 and microbatches of 1 and 3 give the loss of all in one batch.
    """

    def loss(p: int, sequences: int, microbatch: int) -> float:
        config = tiny.config(
            run_dir=str(tmp_path / "none"),
            sequences=sequences,
            microbatch=microbatch,
            model__layers=4,
            data__validation=[numbered],
            trace__enabled=False,
        )
        figures = run_ranks(p, lambda transport: eval_run(config, transport, resume="never"))[0]
        assert figures["tokens"] == WINDOWS * T
        return float(figures["validation_loss"])  # type: ignore[arg-type]

    whole = loss(1, WINDOWS, WINDOWS)
    for p, (sequences, microbatch) in itertools.product((1, 3), ((4, 1), (3, 3), (8, 3))):
        assert loss(p, sequences, microbatch) == pytest.approx(whole, rel=1e-6)
