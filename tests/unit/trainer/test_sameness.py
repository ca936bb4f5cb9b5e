"""What ranks must bring alike: the contents of their batches, and the weights of layers that come as modules."""

from __future__ import annotations

from collections.abc import Callable

import little
import pytest
import torch
from torch import nn

from mpipipe.errors import ConfigError, DataError, MpipipeError
from mpipipe.trainer import Trainer
from mpipipe.trainer.sameness import NOT_LOOKED_AT, WHOLE_BYTES, checksum, joined, refuse_other_batches
from mpipipe.transport import Transport, run_ranks, solo


def each_rank_meets(ranks: int, work: Callable[[Transport], object], kind: type[MpipipeError]) -> list[str]:
    """The error's text on every rank: all of them must meet it, and see it alike."""

    def guarded(transport: Transport) -> str:
        with pytest.raises(kind) as caught:
            work(transport)
        assert caught.value.seen_alike
        return str(caught.value)

    return run_ranks(ranks, guarded)


def made(transport: Transport, **keys: object) -> Trainer:
    return Trainer(little.config(**keys), [little.linear()] * 4, little.square_loss, transport=transport)


@pytest.mark.parametrize("other", [1, 2], ids=["inputs", "targets"])
def test_a_batch_of_other_contents_is_refused_on_every_rank_before_the_weights_change(other: int) -> None:
    def work(transport: Transport) -> None:
        trainer = made(transport)
        trainer.step(little.batch(0))
        before = {name: value.detach().clone() for name, value in trainer.model.parameters.items()}
        batch = list(little.batch(1))
        if transport.rank == 2:
            batch[other - 1] = batch[other - 1].clone()
            batch[other - 1][3, 5] += 1e-6
        try:
            trainer.step(tuple(batch))
        finally:
            assert all(torch.equal(value, before[name]) for name, value in trainer.model.parameters.items())

    found = each_rank_meets(3, work, DataError)
    assert len(set(found)) == 1
    assert found[0].startswith("rank 2 brought another batch than rank 0: every rank must pass the same batch")


def test_an_unseeded_loader_in_an_evaluation_is_refused_on_every_rank() -> None:
    def work(transport: Transport) -> None:
        order = (1, 2) if transport.rank == 0 else (2, 1)
        made(transport).evaluate([little.batch(number) for number in order])

    found = each_rank_meets(2, work, DataError)
    assert found[1].startswith("rank 1 brought another batch to the evaluation than rank")


@pytest.mark.parametrize(("schedule", "chunks", "looks"), [("1f1b", 1, (0, 3)), ("zb-v", 2, (0,))])
def test_ranks_without_first_and_last_stage_may_pass_placeholders(
    schedule: str, chunks: int, looks: tuple[int, ...]
) -> None:
    def work(transport: Transport) -> float:
        config = little.config(schedule=schedule, chunks=chunks, sequences=8)
        trainer = Trainer(config, [little.linear()] * 8, little.square_loss, transport=transport)
        batch = little.batch(0, 8)
        given = batch if transport.rank in looks else (torch.zeros(8, little.WIDTH), torch.zeros(8, little.WIDTH))
        loss = trainer.step(given)
        trainer.evaluate([given])
        return loss

    assert len(set(run_ranks(4, work))) == 1


def test_a_layer_that_changes_its_input_changes_no_checksum() -> None:
    class Doubles(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2)

    def work(transport: Transport) -> None:
        layers = [Doubles, *[little.linear()] * 3]
        Trainer(little.config(), layers, little.square_loss, transport=transport).step(little.batch(0))

    run_ranks(2, work)


def test_every_bit_counts_up_to_a_mebibyte_and_large_shuffles_show() -> None:
    small = torch.zeros(WHOLE_BYTES, dtype=torch.uint8)
    first = checksum([small])
    small[-1] = 1
    assert checksum([small]) != first
    large = torch.randn(64, 3, 80, 80)
    assert large.nbytes > 4 * WHOLE_BYTES
    assert checksum([large]) == checksum([large.clone()])
    assert checksum([large]) != checksum([large[torch.randperm(64, generator=torch.Generator().manual_seed(1))]])


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.bool, torch.complex64, torch.int64])
def test_every_type_has_a_checksum(kind: torch.dtype) -> None:
    values = torch.tensor([[0, 1], [1, 1]]).to(kind)
    assert checksum([values]) == checksum([values.clone()]) != checksum([values[:, :1]])
    assert checksum([values]) != checksum([torch.zeros_like(values)])


def test_transposed_and_inference_tensors_have_the_checksum_of_their_contents() -> None:
    value = torch.randn(4, 3)
    with torch.inference_mode():
        other = value.clone()
    assert checksum([value.t()]) == checksum([value.t().contiguous()]) != checksum([value])
    assert checksum([other]) == checksum([value])
    assert checksum([torch.zeros(2, 0), value.to_sparse()]) == checksum([])


def test_what_is_not_in_host_memory_is_not_looked_at_on_that_rank() -> None:
    elsewhere = checksum([torch.ones(3), torch.ones(3, device="meta")])
    assert elsewhere == joined(elsewhere, 5) == joined(5, elsewhere) == NOT_LOOKED_AT
    refuse_other_batches([7.0, NOT_LOOKED_AT, 7.0])
    with pytest.raises(DataError, match="rank 2 brought another batch than rank 0"):
        refuse_other_batches([7.0, NOT_LOOKED_AT, 8.0])


def modules(seed: int) -> list[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [nn.Linear(little.WIDTH, little.WIDTH) for _ in range(4)]


@pytest.mark.parametrize("evaluates", [False, True])
def test_modules_made_with_other_weights_are_refused_on_every_rank(evaluates: bool) -> None:
    given = [modules(0), modules(0)]
    given[1][2] = modules(1)[2]

    def work(transport: Transport) -> None:
        trainer = Trainer(little.config(), given[transport.rank], little.square_loss, transport=transport)
        if evaluates:
            trainer.evaluate([little.batch(0)])
        trainer.step(little.batch(0))

    found = each_rank_meets(2, work, ConfigError)
    assert found[0].startswith("layer 2 has other weights on rank 1 than on rank 0, so they would depend on the cut.")
    assert "torch.manual_seed(SEED)" in found[0]
    assert "seeded from run.seed" in found[0]


def test_modules_that_a_checkpoint_fills_need_not_be_alike(tmp_path: object) -> None:
    config = little.config(run_dir=str(tmp_path))

    def first(transport: Transport) -> None:
        trainer = Trainer(config, modules(0), little.square_loss, transport=transport)
        trainer.step(little.batch(0))
        trainer.save()

    first(solo())
    given = [modules(0), modules(1)]

    def second(transport: Transport) -> float:
        trainer = Trainer(config, given[transport.rank], little.square_loss, transport=transport)
        trainer.restore()
        return trainer.step(little.batch(1))

    assert len(set(run_ranks(2, second))) == 1
