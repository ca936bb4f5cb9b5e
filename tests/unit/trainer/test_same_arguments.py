"""Every rank calls the trainer with the same arguments; what happens when one does not."""

from __future__ import annotations

import little
import pytest
import tiny
import torch

from mpipipe.errors import EngineError
from mpipipe.trainer import Trainer
from mpipipe.transport import Transport, run_ranks, solo


def test_a_batch_of_another_size_on_one_rank_is_refused_on_all() -> None:
    """7 and 8 sequences are both 4 microbatches of 2: the loss alone would not tell."""
    seen = []

    def work(transport: Transport) -> None:
        trainer = tiny.trainer(tiny.config(model__dropout=0.0), transport)
        rows = 7 if transport.rank == 1 else 8
        with pytest.raises(EngineError, match=r"rank 1 has 7 sequences in the batch, rank 0 has 8") as caught:
            trainer.step(tiny.batch(0, rows))
        seen.append(caught.value.seen_alike)

    run_ranks(3, work)
    assert seen == [True] * 3


def test_a_step_inside_no_grad_trains_all_the_same() -> None:
    outcomes = []
    for context in (torch.enable_grad, torch.no_grad):
        made = Trainer(little.config(), [little.linear(), little.linear()], little.square_loss, transport=solo())
        with context():
            made.step(little.batch(0))
        outcomes.append({name: value.detach().clone() for name, value in made.model.parameters.items()})
    assert all(torch.equal(outcomes[0][name], outcomes[1][name]) for name in outcomes[0])
    assert made.last_report is not None
    assert made.last_report.grad_norm > 0
