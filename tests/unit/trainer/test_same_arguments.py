"""Every rank calls the trainer with the same arguments; what happens when one does not."""

from __future__ import annotations

import little
import pytest
import tiny
import torch

from mpipipe.engine import RunResult
from mpipipe.errors import ConfigError, EngineError
from mpipipe.trainer import Trainer
from mpipipe.transport import Transport, run_ranks, solo


def test_a_batch_of_another_size_on_one_rank_is_refused() -> None:
    """7 and 8 sequences are both 4 microbatches of 2: the loss alone would not tell."""

    def work(transport: Transport) -> None:
        trainer = tiny.trainer(tiny.config(model__dropout=0.0), transport)
        trainer.step(tiny.batch(0, 7 if transport.rank == 1 else 8))

    with pytest.raises(EngineError, match=r"rank 1 was given 7 sequences, rank 0 8|rank 2 was given 8 .* rank 1 7"):
        run_ranks(3, work)


def test_a_step_inside_no_grad_trains_all_the_same() -> None:
    outcomes = []
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        made = Trainer(little.config(), [little.linear(), little.linear()], little.square_loss, transport=solo())
        with context():
            made.step(little.batch(0))
        outcomes.append({name: value.detach().clone() for name, value in made.model.parameters.items()})
    for other in outcomes[1:]:
        assert all(torch.equal(value, other[name]) for name, value in outcomes[0].items())
    assert made.last_report is not None
    assert made.last_report.grad_norm > 0


@pytest.mark.parametrize(
    "given, words",
    [
        ([(2, 2), (2, 2, 2)], "rank 1 has 3 batches in the evaluation, rank 0 has 2"),
        ([(8,), (7,)], "rank 1 has 7 sequences in the evaluation, rank 0 has 8"),
    ],
)
def test_an_evaluation_over_other_batches_on_one_rank_is_refused_on_all(
    given: list[tuple[int, ...]], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPI takes small messages before they are asked for: an extra batch would come up in the next step."""
    monkeypatch.setattr("mpipipe.engine.Engine.run", lambda self, *given: RunResult(1.0, 1, 0, 0, 0))
    seen = []

    def work(transport: Transport) -> None:
        trainer = tiny.trainer(tiny.config(), transport)
        rows = given[min(transport.rank, 1)]
        with pytest.raises(EngineError, match=words) as caught:
            trainer.evaluate([tiny.batch(0, count) for count in rows])
        seen.append(caught.value.seen_alike)

    run_ranks(3, work)
    assert seen == [True] * 3


def test_layers_of_one_name_are_refused() -> None:
    """Parameters, gradients and a checkpoint's tensors are known by the layer's name."""
    layers = [little.linear(), little.linear(), little.linear()]
    with pytest.raises(ConfigError, match="several layers are named 'a'"):
        Trainer(little.config(), layers, little.square_loss, names=["a", "b", "a"], transport=solo())
