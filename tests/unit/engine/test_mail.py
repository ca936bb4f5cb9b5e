"""Messages of the engine: shapes agreed once, buffers used again, few receives open."""

from __future__ import annotations

import little
import pytest
import torch
from spying import Spy
from torch import nn

from mpipipe.device import Memory
from mpipipe.engine.messages import SIZES_KEPT
from mpipipe.engine.window import RECEIVES_OPEN
from mpipipe.errors import MessageMismatchError
from mpipipe.trainer import Trainer
from mpipipe.transport import COLLECTIVE_TAG, Request, Transport, run_ranks

SCHEDULES = [
    ("naive", 1),
    ("naive", 2),
    ("gpipe", 1),
    ("gpipe", 2),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
]


def chain(stages: int) -> list[object]:
    return [little.linear() for _ in range(stages)]


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("interleaved", 2), ("gpipe", 2)])
def test_a_header_goes_once_before_each_activation_of_a_new_shape(schedule: str, chunks: int) -> None:
    """4 microbatches; rows (of a microbatch) and length as they change over the steps."""
    m, p = 4, 2
    crossings = p * chunks - 1
    steps = [  # (rows, length), and how many of the microbatches have a shape not seen before
        ((4, 3), m),
        ((4, 3), 0),
        ((4, 5), m),
        ((7, 5), 3),  # in microbatches of 2, 2, 2 and 1 below: the one of a single row is known
        ((7, 5), 0),
        ((4, 3), 0),
        ((4, 5), 0),
    ]

    def work(transport: Transport) -> list[tuple[int, int]]:
        spy = Spy(transport)
        config = little.config(schedule=schedule, chunks=chunks, sequences=8, microbatch=1)
        trainer = Trainer(config, chain(p * chunks), little.square_loss, transport=spy)
        wide = Trainer.step_report  # the batch of 7 rows is cut in microbatches of 2
        counts = []
        for number, ((rows, length), _) in enumerate(steps):
            size = 2 if rows == 7 else 1
            trainer.config = config.model_copy(update={"batch": config.batch.model_copy(update={"microbatch": size})})
            before = spy.headers, spy.tensors
            wide(trainer, little.batch(number, rows, length, little.WIDTH))
            counts.append((spy.headers - before[0], spy.tensors - before[1]))
        return counts

    ranks = run_ranks(p, work)
    for number, (_, new) in enumerate(steps):
        assert sum(counts[number][0] for counts in ranks) == new * crossings, f"headers of step {number}"
        assert sum(counts[number][1] for counts in ranks) == 2 * m * crossings, f"tensors of step {number}"


def test_evaluation_agrees_on_shapes_of_its_own() -> None:
    """A layer may give another shape in evaluation."""

    class Half(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if self.training else x[:, :2]

    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        return little.square_loss(output, target[:, : output.shape[1]])

    def work(transport: Transport) -> tuple[list[int], list[float]]:
        spy = Spy(transport)
        config = little.config(sequences=4)
        trainer = Trainer(config, [little.linear(), Half, nn.Identity], loss, transport=spy)
        headers, losses = [], []
        for _ in range(2):
            trainer.step(little.batch(0))
            headers.append(spy.headers)
            losses.append(trainer.evaluate([little.batch(1)]))
            headers.append(spy.headers)
        return headers, losses

    alone = run_ranks(1, work)[0]
    both = run_ranks(3, work)
    assert all(losses == alone[1] for _, losses in both)
    assert [sum(headers[k] for headers, _ in both) for k in range(4)] == [8, 16, 16, 16]


class Moody(nn.Module):
    """Gives another output shape the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.times += 1
        return x if self.times <= 4 else x.repeat(1, 2)


def test_another_output_shape_for_the_same_input_shape_is_an_error() -> None:
    def work(transport: Transport) -> None:
        trainer = Trainer(little.config(), [Moody, little.linear()], little.square_loss, transport=transport)
        trainer.step(little.batch(0))
        trainer.step(little.batch(1))

    with pytest.raises(MessageMismatchError, match=r"0SEND_F0 has shape \(1, 12\).*had \(1, 6\)") as caught:
        run_ranks(2, lambda transport: work(transport))
    assert any("rank 0 at 0SEND_F0" in note for note in caught.value.__notes__)


def test_an_output_shape_that_hangs_on_the_contents_is_told_in_the_first_step_already() -> None:
    """Two microbatches of one step, cut by a layer to their own longest row: not the transport's word for it."""

    class Cut(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, : int((x != 0).sum(1).max())]

    inputs = torch.ones(4, 9)
    inputs[2:, 5:] = 0.0

    def work(transport: Transport) -> None:
        layers = [Cut, lambda: nn.LayerNorm(9), nn.Identity]
        trainer = Trainer(little.config(microbatch=2), layers, little.square_loss, transport=transport)
        trainer.step((inputs, inputs))

    with pytest.raises(MessageMismatchError, match=r"0SEND_F1 has shape \(2, 5\).*had \(2, 9\).*input's shape only"):
        run_ranks(3, work)


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("schedule, chunks", SCHEDULES)
def test_buffers_are_used_again_and_few_receives_are_open(schedule: str, chunks: int, p: int) -> None:
    def work(transport: Transport) -> tuple[list[int], int]:
        spy = Spy(transport)
        config = little.config(schedule=schedule, chunks=chunks, sequences=8)
        trainer = Trainer(config, chain(p * chunks), little.square_loss, transport=spy)
        allocated = []
        for step in range(6):
            trainer.step(little.batch(step, 8))
            trainer.evaluate([little.batch(9, 8)])
            allocated.append(trainer._engine.mail.pool.allocated_buffers)
        return allocated, spy.most_open

    for allocated, most_open in run_ranks(p, work):
        assert len(set(allocated[2:])) == 1, allocated
        assert most_open <= RECEIVES_OPEN + 1  # the tensors behind a header
    assert any(most_open > 1 for _, most_open in run_ranks(p, work))


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("interleaved", 2)])
def test_sequences_of_ever_new_lengths_do_not_pile_up_buffers(schedule: str, chunks: int) -> None:
    """With a free list for every size that was ever seen, a training on texts of all lengths grew to no end."""

    def work(transport: Transport) -> tuple[int, int, bool]:
        config = little.config(schedule=schedule, chunks=chunks)
        trainer = Trainer(config, chain(2 * chunks), little.square_loss, transport=transport)
        pool = trainer._engine.mail.pool
        for step in range(2):
            trainer.step(little.batch(step, 4, 1, little.WIDTH))
        of_one_size, most = pool.allocated_buffers, 0
        for length in [*range(2, 4 * SIZES_KEPT), *range(4 * SIZES_KEPT, 2, -1)]:
            trainer.step(little.batch(length, 4, length, little.WIDTH))
            most = max(most, pool.allocated_buffers)
        for step in range(2):  # steady from the second on
            trainer.step(little.batch(step, 4, 5, little.WIDTH))
        before = pool.allocated_buffers
        trainer.step(little.batch(9, 4, 5, little.WIDTH))
        return of_one_size, most, pool.allocated_buffers == before

    for of_one_size, most, steady in run_ranks(2, work):
        assert of_one_size > 0
        assert most <= (SIZES_KEPT + 2) * of_one_size
        assert steady


class Apart(nn.Module):
    """Trains by itself, and gives its output without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(little.WIDTH, little.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).detach()


def test_a_rank_without_gradients_to_wait_for_runs_no_further_ahead_than_the_table() -> None:
    """Its backward needs no message: it would send all microbatches at once, and hold the memory of all of them."""

    class Sends(Spy):
        most, sent = 0, ()

        def isend(self, memory: Memory, peer: int, tag: int) -> Request:
            request = super().isend(memory, peer, tag)
            if tag < COLLECTIVE_TAG:
                self.sent = (*(one for one in self.sent if not one.test()), request)
                self.most = max(self.most, len(self.sent))
            return request

    def work(transport: Transport) -> int:
        sends = Sends(transport)
        config = little.config(sequences=16)
        trainer = Trainer(config, [Apart, little.linear()], little.square_loss, transport=sends)
        trainer.step(little.batch(0, 16))
        sends.most = 0
        trainer.step(little.batch(1, 16))
        return sends.most

    assert run_ranks(2, work)[0] <= 2
