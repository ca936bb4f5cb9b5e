"""A user's own dropout: torch's generator at (seed, step, microbatch, layer), whatever else has been drawn."""

from __future__ import annotations

import little
import pytest
import torch
from torch import nn

from mpipipe.trainer import Trainer
from mpipipe.transport import run_ranks, solo


def layers() -> list[object]:
    return [
        little.linear(),
        lambda: nn.Dropout(0.4),
        lambda: nn.Sequential(nn.Linear(little.WIDTH, little.WIDTH), nn.Dropout(0.3), nn.Dropout(0.3)),
        little.linear(),
        nn.Dropout,
        little.linear(),
    ]


def batches() -> list[object]:
    return [little.batch(step, 6) for step in range(3)]


def run(p: int = 1, **keys: object) -> little.Outcome:
    return little.train_on(p, layers, little.config(sequences=6, **keys), batches(), evaluate=lambda _: batches()[:1])


@pytest.mark.parametrize(
    "p, schedule, chunks",
    [(1, "gpipe", 1), (2, "1f1b", 1), (3, "1f1b", 1), (3, "gpipe", 2), (2, "interleaved", 3), (1, "interleaved", 2)],
)
def test_masks_do_not_depend_on_the_cut(p: int, schedule: str, chunks: int) -> None:
    little.assert_same(run(p, schedule=schedule, chunks=chunks), run())


def test_masks_depend_on_seed_step_microbatch_and_layer() -> None:
    drawn: list[torch.Tensor] = []

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(50))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.rand(50)
            drawn.append(mask)
            return x * self.weight * (mask > 0.5)

    def collect(seed: int) -> list[list[float]]:
        drawn.clear()
        config = little.config(sequences=2, run__seed=seed)
        little.train_on(1, lambda: [Keeps, Keeps], config, [little.batch(0, 2, 50), little.batch(0, 2, 50)])
        return [mask.tolist() for mask in drawn]

    first, again, other = collect(1), collect(1), collect(2)
    assert first == again
    assert len({tuple(mask) for mask in first + other}) == 2 * 2 * 2 * 2  # steps, microbatches, layers, seeds


def test_dropout_acts_and_not_in_an_evaluation() -> None:
    plain = [layer for layer in layers() if layer is not nn.Dropout]
    assert run().steps != little.train_on(1, lambda: plain, little.config(sequences=6), batches()).steps
    trainer = Trainer(little.config(sequences=6), layers(), little.square_loss, transport=solo())
    assert trainer.evaluate(batches()) == trainer.evaluate(batches())


def test_the_user_s_own_draws_are_alike_on_every_rank() -> None:
    """B14: a script that shuffles with torch's generator must see one order on all ranks, whatever their layers drew.

    One rank after another here, since ranks of one process share torch's generator.
    """

    def drawn(steps: int) -> list[int]:
        torch.manual_seed(8)
        trainer = Trainer(little.config(sequences=6), layers(), little.square_loss, transport=solo())
        order = torch.randperm(1000).tolist()
        for data in batches()[:steps]:
            trainer.step(data)
            trainer.evaluate([data])
            order += torch.randperm(1000).tolist()
        while len(order) < 4000:
            order += torch.randperm(1000).tolist()
        return order

    assert drawn(0) == drawn(1) == drawn(3)


def test_factories_draw_by_seed_and_layer_and_leave_the_generator_alone() -> None:
    def weights(p: int, seed: int) -> dict[str, torch.Tensor]:
        config = little.config(run__seed=seed)

        def work(transport: object) -> dict[str, torch.Tensor]:
            made = [little.linear() for _ in range(4)]
            return little.parts_of(Trainer(config, made, little.square_loss, transport=transport))  # type: ignore[arg-type]

        found: dict[str, torch.Tensor] = {}
        for part in run_ranks(p, work):
            found.update(part)
        return found

    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = weights(1, 5)
    assert torch.equal(torch.get_rng_state(), before)
    for p in (2, 3, 4):
        for name, value in weights(p, 5).items():
            assert torch.equal(value, one[name])
    everything = [*one.values(), *weights(1, 6).values()]
    matrices = {tuple(value.flatten().tolist()) for value in everything if value.dim() == 2}
    assert len(matrices) == 8  # four layers, two seeds: no two alike
