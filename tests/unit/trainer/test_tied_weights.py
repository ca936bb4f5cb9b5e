"""One weight in several layers: equal copies on every rank, and the bits of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import little
import pytest
import torch
from torch import nn

from mpipipe.errors import ConfigError
from mpipipe.trainer import Trainer
from mpipipe.transport import Transport, run_ranks, solo

STEPS = 5
CUTS = [
    (1, "1f1b", 1),
    (2, "1f1b", 1),
    (3, "1f1b", 1),
    (3, "gpipe", 1),
    (4, "1f1b", 1),
    (1, "gpipe", 2),
    (2, "interleaved", 2),
]


class Reader(nn.Module):
    """Multiplies with the transposed weight, as a head does."""

    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(little.WIDTH, little.WIDTH) / 3) if weight is None else weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


def pairs_of_factories() -> tuple[Sequence[object], Sequence[tuple[str, str]]]:
    return [little.linear(), nn.Tanh, little.linear(), Reader], [("0.weight", "3.weight")]


def pairs_backwards() -> tuple[Sequence[object], Sequence[tuple[str, str]]]:
    return [little.linear(), nn.Tanh, little.linear(), Reader], [("3.weight", "0.weight")]


def shared_parameter() -> tuple[Sequence[object], Sequence[tuple[str, str]]]:
    torch.manual_seed(4)
    first = nn.Linear(little.WIDTH, little.WIDTH)
    return [first, nn.Tanh(), nn.Linear(little.WIDTH, little.WIDTH), Reader(first.weight)], []


def three_ways() -> tuple[Sequence[object], Sequence[tuple[str, str]]]:
    return [little.linear(), Reader, nn.Tanh, little.linear(), Reader], [
        ("4.weight", "1.weight"),
        ("1.weight", "0.weight"),
    ]


def neighbours() -> tuple[Sequence[object], Sequence[tuple[str, str]]]:
    """On one rank for every cut but the finest."""
    return [little.linear(), Reader, nn.Tanh, little.linear()], [("0.weight", "1.weight")]


def the_same_module_twice() -> tuple[Sequence[object], Sequence[tuple[str, str]]]:
    torch.manual_seed(4)
    twice = nn.Linear(little.WIDTH, little.WIDTH)
    return [twice, nn.Tanh(), twice, nn.Linear(little.WIDTH, little.WIDTH)], []


class Two(nn.Module):
    """Two weights of one shape, the later one in the alphabet first."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.randn(little.WIDTH, little.WIDTH) / 3)
        self.a = nn.Parameter(torch.randn(little.WIDTH, little.WIDTH) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.b) @ self.a.t()


def within_one_layer() -> tuple[Sequence[object], Sequence[tuple[str, str]]]:
    return [little.linear(), nn.Tanh, Two, little.linear()], [("2.b", "2.a")]


def within_one_layer_and_beyond() -> tuple[Sequence[object], Sequence[tuple[str, str]]]:
    return [little.linear(), nn.Tanh, Two, Reader], [("2.b", "2.a"), ("2.b", "0.weight"), ("3.weight", "2.b")]


class SharesInside(nn.Module):
    """Uses one Parameter under two names."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.one, self.other = Reader(weight), Reader(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(torch.tanh(self.one(x)))


def shared_parameter_used_twice_in_a_layer() -> tuple[Sequence[object], Sequence[tuple[str, str]]]:
    torch.manual_seed(4)
    first = nn.Linear(little.WIDTH, little.WIDTH)
    return [first, nn.Tanh(), SharesInside(first.weight), nn.Linear(little.WIDTH, little.WIDTH)], []


KINDS: dict[str, tuple[Callable[[], tuple[Sequence[object], Sequence[tuple[str, str]]]], set[tuple[str, ...]]]] = {
    "pairs of factories": (pairs_of_factories, {("0.weight", "3.weight")}),
    "pairs backwards": (pairs_backwards, {("0.weight", "3.weight")}),
    "a shared parameter": (shared_parameter, {("0.weight", "3.weight")}),
    "three ways": (three_ways, {("0.weight", "1.weight", "4.weight")}),
    "neighbours": (neighbours, {("0.weight", "1.weight")}),
    "within one layer": (within_one_layer, {("2.a", "2.b")}),
    "within one layer and beyond": (within_one_layer_and_beyond, {("0.weight", "2.a", "2.b", "3.weight")}),
    "shared inside a layer": (shared_parameter_used_twice_in_a_layer, {("0.weight", "2.one.weight", "2.other.weight")}),
}


def by_hand(make: Callable[[], tuple[Sequence[object], Sequence[tuple[str, str]]]]) -> list[float]:
    """The losses of plain torch, with one Parameter for all places of a weight."""
    layers, tied = make()
    modules = []
    for index, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            torch.manual_seed(5 * 1_000_003 + index)
            layer = layer()  # type: ignore[operator]
        modules.append(layer)
    chain = nn.Sequential(*modules)
    places = {name for pair in tied for name in pair}
    first = min(places, default="")
    for name in sorted(places - {first}):
        path, _, key = name.rpartition(".")
        setattr(chain.get_submodule(path), key, chain.get_parameter(first))
    config = little.config()
    matrices = [p for p in chain.parameters() if p.dim() >= 2]
    vectors = [p for p in chain.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2, betas=config.optimizer.betas, eps=1e-8)
    losses = []
    for step in range(STEPS):
        inputs, targets = little.batch(step)
        optimizer.zero_grad()
        loss = little.square_loss(chain(inputs), targets)[0] / 4
        loss.backward()
        torch.nn.utils.clip_grad_norm_(chain.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(
    p: int, make: Callable[[], tuple[Sequence[object], Sequence[tuple[str, str]]]], schedule: str, chunks: int
) -> little.Outcome:
    config = little.config(schedule=schedule, chunks=chunks)
    data = [little.batch(step) for step in range(STEPS)]

    def work(transport: Transport) -> little.Outcome:
        layers, tied = make()
        return little.train(lambda: layers, config, transport, data, tied=tied)

    return little.merged(run_ranks(p, work))


@pytest.mark.parametrize("kind", KINDS)
def test_copies_stay_equal_and_every_cut_gives_one_rank_s_bits(kind: str) -> None:
    make, groups = KINDS[kind]
    expected = run(1, make, "1f1b", 1)
    assert [loss for loss, _ in expected.steps] == pytest.approx(by_hand(make), rel=2e-5)
    for p, schedule, chunks in CUTS:
        found = run(p, make, schedule, chunks)
        little.assert_same(found, expected)
        for group in groups:
            for name in group[1:]:
                assert torch.equal(found.parts[name], found.parts[group[0]]), (name, p, chunks)
            assert [name for name in found.parameters if name in group] == [group[0]]


def test_one_module_as_two_layers_on_one_rank() -> None:
    """Ranks of one process would share the module, so here only chunks."""
    make = the_same_module_twice
    expected = run(1, make, "1f1b", 1)
    assert [loss for loss, _ in expected.steps] == pytest.approx(by_hand(make), rel=2e-5)
    little.assert_same(run(1, make, "gpipe", 2), expected)
    assert list(expected.parameters) == ["0.weight", "0.bias", "3.weight", "3.bias"]


def test_moments_and_norms_know_a_tied_weight_once() -> None:
    layers, tied = three_ways()
    trainer = Trainer(little.config(), layers, little.square_loss, tied=tied, transport=solo())
    assert [info.name for info in trainer.model.everything] == ["0.weight", "0.bias", "3.weight", "3.bias"]


WRONG = {
    "no such layer": ([("0.weight", "9.weight")], "'9.weight' is in no layer"),
    "no such parameter": ([("0.weight", "3.weigth")], r"has a parameter '3.weigth'. Did you mean '3.weight'\?"),
    "not a parameter's name": ([("0", "3.weight")], "'0' is in no layer"),
    "other shapes": ([("0.weight", "3.bias")], r"0.weight \(\(6, 6\), trained\) and 3.bias \(\(6,\), trained\)"),
}


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_pair_is_refused_alike_on_every_rank(kind: str, p: int) -> None:
    tied, words = WRONG[kind]

    def work(transport: Transport) -> str:
        with pytest.raises(ConfigError, match=words) as caught:
            Trainer(
                little.config(), [little.linear() for _ in range(4)], little.square_loss, tied=tied, transport=transport
            )
        return str(caught.value)

    assert len(set(run_ranks(p, work))) == 1


def test_a_frozen_and_a_trained_part_are_refused() -> None:
    def frozen() -> nn.Module:
        return Reader().requires_grad_(False)

    def work(transport: Transport) -> None:
        with pytest.raises(ConfigError, match=r"0.weight .*trained\) and 1.weight .*frozen\)"):
            Trainer(
                little.config(),
                [Reader, frozen],
                little.square_loss,
                tied=[("0.weight", "1.weight")],
                transport=transport,
            )

    run_ranks(2, work)


@pytest.mark.parametrize("p", [1, 3])
def test_a_frozen_tied_weight_stays_and_is_restored_on_every_rank(p: int, tmp_path: object) -> None:
    """Restored into a model that began with other values."""

    def layers(seed: int) -> list[object]:
        def frozen() -> nn.Module:
            torch.manual_seed(seed)
            return Reader().requires_grad_(False)

        return [frozen, little.linear(), frozen]

    tied = [("0.weight", "2.weight")]

    def save(transport: Transport) -> dict[str, torch.Tensor]:
        config = little.config(run_dir=str(tmp_path))
        with Trainer(config, layers(1), little.square_loss, tied=tied, transport=transport) as trainer:
            trainer.step(little.batch(0))
            trainer.save()
            return little.parts_of(trainer)

    def load(transport: Transport) -> dict[str, torch.Tensor]:
        config = little.config(run_dir=str(tmp_path))
        with Trainer(config, layers(2), little.square_loss, tied=tied, transport=transport) as trainer:
            assert trainer.restore() == 1
            return little.parts_of(trainer)

    def whole(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: value for part in parts for name, value in part.items()}

    saved, loaded = whole(run_ranks(p, save)), whole(run_ranks(p, load))
    assert saved.keys() == loaded.keys()
    for name, value in saved.items():
        assert torch.equal(loaded[name], value), name
    assert torch.equal(saved["0.weight"], saved["2.weight"])
