"""What two layers share: tied weights with hooks, weights and buffers that nothing says are shared."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import little
import pytest
import torch
from torch import nn

from mpipipe.errors import ConfigError, EngineError
from mpipipe.trainer import Trainer
from mpipipe.transport import Transport, run_ranks, solo

W = little.WIDTH
BATCHES = [little.batch(step) for step in range(3)]


def refused(p: int, layers: object, **given: object) -> ConfigError:
    def work(transport: Transport) -> None:
        trainer = Trainer(little.config(), layers(), little.square_loss, transport=transport, **given)  # type: ignore[operator]
        trainer.step(BATCHES[0])

    with pytest.raises(ConfigError) as caught:
        run_ranks(p, work)
    return caught.value


# --- tied weights with hooks ---


def tied_modules() -> list[nn.Module]:
    torch.manual_seed(3)
    first, last = nn.Linear(W, W, bias=False), nn.Linear(W, W, bias=False)
    last.weight = first.weight
    first.weight.register_hook(lambda gradient: gradient * 2)
    return [first, nn.Linear(W, W), nn.Linear(W, W), last]


def tied_factories() -> Sequence[object]:
    def hooked() -> nn.Module:
        layer = nn.Linear(W, W, bias=False)
        layer.weight.register_hook(lambda gradient: gradient * 2)
        return layer

    return [lambda: nn.Linear(W, W, bias=False), little.linear(), little.linear(), hooked]


@pytest.mark.parametrize("layers", [tied_modules, tied_factories])
@pytest.mark.parametrize(
    "p, schedule, chunks", [(2, "1f1b", 1), (4, "gpipe", 1), (1, "zb-h1", 1), (2, "interleaved", 2)]
)
def test_a_hook_on_a_tied_weight_works_wherever_the_weight_is(
    layers: object, p: int, schedule: str, chunks: int
) -> None:
    """On one rank the second layer had a new leaf without the hook: another norm than on two ranks."""
    given = {} if layers is tied_modules else {"tied": [("0.weight", "3.weight")]}
    alone = little.train_on(1, layers, little.config(), BATCHES, **given)  # type: ignore[arg-type]
    cut = little.config(schedule=schedule, chunks=chunks)
    little.assert_same(alone, little.train_on(p, layers, cut, BATCHES, **given))  # type: ignore[arg-type]


def test_a_hook_on_a_shared_weight_sees_what_it_would_in_plain_torch() -> None:
    modules = tied_modules()
    chain = nn.Sequential(*modules)
    (little.square_loss(chain(BATCHES[0][0]), BATCHES[0][1])[0] / 4).backward()
    norm = torch.cat([p.grad.flatten() for p in chain.parameters()]).double().norm()
    found = little.train_on(1, tied_modules, little.config(), BATCHES[:1]).steps[0][1]
    assert found == pytest.approx(float(norm), rel=1e-5)


# --- weights that nothing says are shared ---


def one_module_in_two_functions() -> Sequence[object]:
    torch.manual_seed(3)
    one = nn.Linear(W, W)
    return [lambda: one, little.linear(), little.linear(), lambda: one]


def one_parameter_in_two_functions() -> Sequence[object]:
    torch.manual_seed(3)
    one, other = nn.Linear(W, W), nn.Linear(W, W)
    other.weight = one.weight
    return [lambda: one, little.linear(), little.linear(), lambda: other]


def one_memory_in_two_modules() -> Sequence[object]:
    torch.manual_seed(3)
    one, other = nn.Linear(W, W), nn.Linear(W, W)
    other.weight = nn.Parameter(one.weight.detach())
    return [one, little.linear(), little.linear(), other]


WEIGHT, BIAS = ("0.weight", "3.weight"), ("0.bias", "3.bias")


@pytest.mark.parametrize(
    "layers, pairs, alike",
    [
        (one_module_in_two_functions, [WEIGHT, BIAS], False),
        (one_parameter_in_two_functions, [WEIGHT], False),
        (one_memory_in_two_modules, [WEIGHT], True),
    ],
)
def test_a_weight_that_two_layers_share_unsaid_is_refused_and_taken_when_said(
    layers: object, pairs: list[tuple[str, str]], alike: bool
) -> None:
    error = refused(1, layers)
    assert f"Give tied={pairs} to the trainer" in str(error)
    assert "parameters 0.weight and 3.weight are one" in str(error)
    assert error.seen_alike is alike
    alone = little.train_on(1, layers, little.config(), BATCHES, tied=pairs)  # type: ignore[arg-type]
    for p in (2, 4):
        little.assert_same(alone, little.train_on(p, layers, little.config(), BATCHES, tied=pairs))  # type: ignore[arg-type]


def test_a_frozen_module_in_two_functions_is_no_matter() -> None:
    def layers() -> Sequence[object]:
        torch.manual_seed(3)
        one = nn.Linear(W, W).requires_grad_(False)
        return [lambda: one, little.linear(), little.linear(), lambda: one]

    alone = little.train_on(1, layers, little.config(), BATCHES)
    little.assert_same(alone, little.train_on(2, layers, little.config(), BATCHES))


# --- buffers ---


class With(nn.Module):
    """A linear map of its own, and a module that others use too."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(W, W)
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(self.own(x))


class Scale(nn.Module):
    """Has a buffer, which it may count up in place or anew."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("seen", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.seen.clone()
        if self.how == "in place":
            self.seen += 1
        elif self.how == "anew":
            self.seen = self.seen + 1
        return y


@pytest.mark.parametrize("p", [1, 2])
def test_running_statistics_in_two_layers_are_refused(p: int) -> None:
    def layers() -> Sequence[object]:
        norm = nn.BatchNorm1d(W)
        return [With(norm), nn.Linear(W, W), With(norm), nn.Linear(W, W)]

    error = refused(p, layers)
    assert "layers 0 and 2 share 2.shared (BatchNorm1d), which keeps running statistics" in str(error)
    assert error.seen_alike

    def functions() -> Sequence[object]:
        norm = nn.BatchNorm1d(W)
        return [lambda: With(norm), lambda: With(norm), little.linear(), little.linear()]

    assert not refused(p, functions).seen_alike


@pytest.mark.parametrize("kind", ["without statistics", "evaluating", "constant"])
def test_other_shared_modules_with_buffers_are_fine(kind: str) -> None:
    def layers() -> Sequence[object]:
        torch.manual_seed(2)
        norm = {
            "without statistics": lambda: nn.BatchNorm1d(W, track_running_stats=False),
            "evaluating": lambda: nn.BatchNorm1d(W, affine=False).eval(),
            "constant": lambda: Scale("never"),
        }[kind]()
        return [With(norm), nn.Linear(W, W), With(norm), nn.Linear(W, W)]

    config = little.config(microbatch=2)
    alone = little.train_on(1, layers, config, BATCHES)
    little.assert_same(alone, little.train_on(2, layers, config, BATCHES))


@pytest.mark.parametrize("how", ["in place", "anew"])
@pytest.mark.parametrize("p", [1, 2])
def test_a_shared_buffer_that_changes_is_refused_when_it_does(how: str, p: int) -> None:
    def layers() -> Sequence[object]:
        torch.manual_seed(2)
        shared = Scale(how)
        return [With(shared), nn.Linear(W, W), With(shared), nn.Linear(W, W)]

    assert r"layers 0 and 2 share the buffer 'seen' (Scale), and one of them changed it" in str(refused(p, layers))


def test_a_buffer_of_two_modules_counts_as_shared_and_a_restore_changes_nothing(tmp_path: Path) -> None:
    def layers(how: str) -> list[nn.Module]:
        torch.manual_seed(2)
        one, other = Scale(how), Scale("never")
        other.seen = one.seen
        return [With(one), With(other)]

    assert "layers 0 and 1 share the buffer 'seen'" in str(refused(1, lambda: layers("in place")))
    with Trainer(
        little.config(run_dir=str(tmp_path)), layers("never"), little.square_loss, transport=solo()
    ) as trainer:
        trainer.step(BATCHES[0])
        trainer.save()
        assert trainer.restore() == 1
        trainer.step(BATCHES[1])


# --- what comes too late ---


@pytest.mark.parametrize("layer", [0, 1])
def test_a_weight_that_is_frozen_between_steps_is_told(layer: int) -> None:
    """The first layer went on by its moments and its decay, in silence."""
    modules = [nn.Linear(W, W), nn.Linear(W, W)]
    trainer = Trainer(little.config(), modules, little.square_loss, transport=solo())
    trainer.step(BATCHES[0])
    modules[layer].requires_grad_(False)
    with pytest.raises(EngineError, match=rf"parameter {layer}\.weight was frozen after the trainer was made"):
        trainer.step(BATCHES[1])


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("lazy", [lambda: nn.LazyLinear(W), lambda: nn.Sequential(nn.LazyBatchNorm1d(affine=False))])
def test_a_lazy_module_is_refused_by_name(p: int, lazy: object) -> None:
    error = refused(p, lambda: [little.linear(), lazy])
    assert "layer 1 has the parameter or buffer" in str(error)
    assert not error.seen_alike
    assert refused(p, lambda: [little.linear(), lazy()]).seen_alike  # type: ignore[operator]


def test_a_sparse_gradient_is_added_as_a_dense_one() -> None:
    data = [(torch.tensor([0, 2, 2, 5]), little.batch(step)[1]) for step in range(3)]

    def layers(sparse: bool) -> Sequence[object]:
        return [lambda: nn.Embedding(9, W, sparse=sparse), little.linear(), little.linear()]

    config = little.config(microbatch=2)
    alone = little.train_on(1, lambda: layers(False), config, data)
    for p, schedule in ((1, "1f1b"), (2, "1f1b"), (3, "zb-h1")):
        found = little.train_on(p, lambda: layers(True), little.config(microbatch=2, schedule=schedule), data)
        little.assert_same(alone, found)


# --- a table whose forwards are not in microbatch order ---


@pytest.mark.parametrize("text, told", [("0F1,0F0,0B0,0B1", True), ("0F0,0F1,0B0,0B1", False)])
def test_forwards_out_of_order_are_told_where_a_layer_has_buffers(
    text: str, told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = tmp_path / "own.csv"
    table.write_text("\n".join(text.replace("0F", f"{stage}F").replace("0B", f"{stage}B") for stage in (0, 1)) + "\n")
    config = little.config(schedule=str(table), sequences=4, microbatch=2)

    def work(transport: Transport) -> None:
        layers = [little.linear(), lambda: nn.Sequential(nn.Linear(W, W), nn.BatchNorm1d(W))]
        Trainer(config, layers, little.square_loss, transport=transport)

    with caplog.at_level(logging.WARNING, logger="mpipipe"):
        run_ranks(2, work)
    said = [record.getMessage() for record in caplog.records if "forwards of stage" in record.getMessage()]
    assert len(said) == told
    assert all("the forwards of stage 1 not in microbatch order: if layer 1 changes buffers" in one for one in said)
