"""What a user's script gives the trainer: layers that are none, batches that are no pair or of another size, and where
an error says that it was.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import little
import pytest
import torch
from torch import nn

from mpipipe.errors import CheckpointMismatchError, ConfigError, DataError, TopologyError
from mpipipe.trainer import Trainer
from mpipipe.transport import Transport, run_ranks, solo


def made(layers: object, **keys: object) -> Trainer:
    return Trainer(little.config(**keys), layers, little.square_loss, transport=solo())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([little.linear(), "linear"], "layer 1 is a str ('linear') (allowed: a torch module, or a function without"),
        ([little.linear(), None], "layer 1 is a NoneType ('None') (allowed: a torch module, or a function without"),
        (nn.Linear(2, 2), "layers is a Linear (allowed: a list of modules, or of functions)"),
        ((little.linear() for _ in range(2)), "layers is a generator (allowed: a list of modules, or of functions)"),
        ([lambda: 3], "the function for layer 0 returned a int (allowed: a torch module)"),
    ],
)
def test_layers_that_are_none(layers: object, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(layers)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("layers", [nn.Sequential, nn.ModuleList, tuple])
def test_lists_of_every_kind_are_taken(layers: type) -> None:
    modules = [nn.Linear(little.WIDTH, little.WIDTH) for _ in range(2)]
    made(layers(*modules) if layers is nn.Sequential else layers(modules)).step(little.batch(0))


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (torch.zeros(2, little.WIDTH), f"a Tensor of shape (2, {little.WIDTH})"),
        ({"input_ids": torch.zeros(2), "labels": torch.zeros(2)}, "a dict with 'input_ids', 'labels'"),
        ((torch.zeros(2), torch.zeros(2), torch.zeros(2)), "a tuple of 3"),
        ([torch.zeros(2)], "a list of 1"),
        ("ab", "a str"),
        (None, "a NoneType"),
    ],
)
def test_a_batch_is_a_pair(batch: object, found: str) -> None:
    trainer = made([little.linear()])
    for act in (trainer.step, lambda given: trainer.evaluate([given])):
        with pytest.raises(DataError) as caught:
            act(batch)
        assert str(caught.value) == f"a batch is (inputs, targets); found {found}"


def test_a_list_of_two_is_a_pair() -> None:
    """A DataLoader gives one."""
    made([little.linear()]).step(list(little.batch(0)))


def test_a_batch_of_another_size_is_taken_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def work(transport: Transport) -> None:
        config = little.config(sequences=4, microbatch=2)
        trainer = Trainer(config, [little.linear()] * 2, little.square_loss, transport=transport)
        trainer.step(little.batch(0, 4))
        for rows in (9, 3, 4, 9):
            trainer.step(little.batch(1, rows))

    with caplog.at_level(logging.WARNING, "mpipipe"):
        run_ranks(2, work)
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "a batch of 9 rows, and batch.sequences = 4: it is taken as it is, with m = 5 in this step, where the run file "
        "makes 2 (said once)"
    ]


class Refuses(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x == 13).any()):
            raise ZeroDivisionError("as asked for")
        return x


def test_an_error_in_a_layer_names_the_step_or_the_batch_of_the_evaluation() -> None:
    trainer = made([Refuses, little.linear()])
    trainer.step(little.batch(0))
    bad = (torch.full((4, little.WIDTH), 13.0), little.batch(0)[1])
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.step(bad)
    assert caught.value.__notes__[-1] == "mpipipe: in step 2"
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.evaluate([little.batch(0), bad])
    assert caught.value.__notes__[-1] == "mpipipe: in batch 2 of an evaluation"


@dataclass(frozen=True)
class Fixed(Exception):
    """Takes no attribute, and so no note."""

    what: str


class RaisesFixed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise Fixed("hot")


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("built", [True, False])
def test_an_error_that_takes_no_notes_keeps_its_type(p: int, built: bool) -> None:
    """It became ``FrozenInstanceError: cannot assign to field '__notes__'``, without a word of what was wrong."""

    def fails() -> nn.Module:
        raise Fixed("hot")

    def work(transport: Transport) -> None:
        layers = [little.linear(), fails if not built else RaisesFixed]
        Trainer(little.config(), layers, little.square_loss, transport=transport).step(little.batch(0))

    with pytest.raises(Fixed) as caught:
        run_ranks(p, work)
    assert caught.value.what == "hot"


def test_sys_exit_in_a_layer_tells_where() -> None:
    class Exits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sys.exit(5)

    with pytest.raises(SystemExit) as caught:
        made([little.linear(), Exits]).step(little.batch(0))
    assert caught.value.code == 5
    assert caught.value.__notes__[0] == "mpipipe: in layer 1 (Exits), stage 0, microbatch 0"
    assert caught.value.__notes__[-1] == "mpipipe: in step 1"


def test_a_checkpoint_of_other_layers_speaks_of_the_script(tmp_path: Path) -> None:
    first = made([little.linear()] * 2, run_dir=str(tmp_path))
    first.step(little.batch(0))
    first.save()
    with pytest.raises(CheckpointMismatchError) as caught:
        made([little.linear()] * 3, run_dir=str(tmp_path)).restore()
    assert "Compare the layers of the script" in str(caught.value)
    assert "[model]" not in str(caught.value)


def test_another_number_of_ranks_speaks_of_the_script() -> None:
    with pytest.raises(TopologyError, match=r"start 'mpirun -n 3 python YOUR_SCRIPT', or remove pipeline\.ranks"):
        made([little.linear()] * 3, pipeline__ranks=3)
