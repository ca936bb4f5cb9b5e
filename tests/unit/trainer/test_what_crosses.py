"""What can't go from layer to layer, what changes on its way, whose shapes differ: one rank's bits, or an error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import little
import pytest
import spying
import torch
from nested import W, apply, data, everywhere, only, settings
from torch import nn

from mpipipe.errors import DataError, EngineError, MessageMismatchError, TransportError
from mpipipe.trainer import Trainer
from mpipipe.transport import Transport, run_ranks, solo

# --- in place ---


def _in_no_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x.mul_(2)


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "side": lambda v: (v[0], v[1].add_(1), v[2]),
    "view of a side": lambda v: (v[0], v[1], v[2][:1].logical_not_().expand_as(v[2])),
    "without grad": lambda v: (_in_no_grad(v[0]), v[1], v[2]),
}


@pytest.mark.parametrize("what", IN_PLACE)
@pytest.mark.parametrize("p", [1, 2, 4])
def test_a_layer_that_changes_what_it_got_is_refused(p: int, what: str) -> None:
    """In training and in evaluation: what it changes is the batch on one rank, and a buffer on another."""
    changing = only(IN_PLACE[what])
    layers = [apply(lambda f, v: (f(v[0]), v[1], v[2])), changing, apply(lambda f, v: f(v[0]) * v[1]), little.linear()]
    inputs = (little.batch(0)[0], torch.arange(4)[:, None], torch.ones(4, 3, dtype=torch.bool))
    batch = (inputs, little.batch(0)[1])

    def act(evaluates: bool) -> Callable[[Transport], object]:
        def run(transport: Transport) -> object:
            trainer = Trainer(settings(), layers, little.square_loss, transport=transport)
            return trainer.evaluate([batch]) if evaluates else trainer.step(batch)

        return run

    for evaluates in (False, True):
        with pytest.raises(EngineError, match=r"layer 1 \(Only\) changed its input in place"):
            run_ranks(p, act(evaluates))


@pytest.mark.parametrize("p", [1, 2])
def test_a_loss_that_changes_a_side_output_is_refused(p: int) -> None:
    """The output's mask is the batch's own memory on one rank."""
    layers = [apply(lambda f, v: (f(v[0]), v[1])) for _ in range(3)]

    def loss(output: Any, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        return little.square_loss(output[0] * output[1].neg_(), target)

    def act(transport: Transport) -> None:
        Trainer(settings(), layers, loss, transport=transport).step(batch)

    inputs, target = little.batch(0)
    batch = ((inputs, torch.arange(4)[:, None]), target)
    with pytest.raises(EngineError, match="loss function changed the output in place"):
        run_ranks(p, act)
    with Trainer(settings(), layers, loss, transport=solo()) as trainer:  # in an evaluation it has a copy
        batch = ((inputs, torch.arange(4)[:, None]), target)
        assert trainer.evaluate([batch] * 2) == trainer.evaluate([batch])
    assert batch[0][1].flatten().tolist() == [0, 1, 2, 3]


class Counting(nn.Module):
    """Returns a buffer that it changes in place for each microbatch."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)
        self.register_buffer("count", torch.zeros(1))
        self.copies = copies

    def forward(self, x: torch.Tensor) -> Any:
        self.count += 1
        return self.linear(x), self.count.clone() if self.copies else self.count


@pytest.mark.parametrize("p, schedule, chunks", [(2, "gpipe", 1), (1, "looped-bfs", 2), (2, "interleaved", 2)])
def test_a_buffer_that_is_handed_on_and_then_changed(p: int, schedule: str, chunks: int) -> None:
    """Its earlier contents are gone where another stage of the rank takes them later; or are being sent."""

    def layers(copies: bool) -> list[Any]:
        rest = [apply(lambda f, v: (f(v[0]), v[1])) for _ in range(3)]
        return [lambda: Counting(copies), *rest, apply(lambda f, v: f(v[0]) * v[1])]

    config = settings(schedule, chunks)
    with pytest.raises(EngineError, match=r"a layer of stage 0 \(layer 0 .* had returned for an earlier microbatch"):
        little.train_on(p, lambda: layers(False), config, data())
    everywhere(layers(True), cuts=[(p, schedule, chunks)])


# --- what can't cross ---


def refused(layers: Sequence[Any], p: int = 2, batches: Sequence[Any] = (), **keys: Any) -> str:
    with pytest.raises((EngineError, MessageMismatchError)) as caught:
        little.train_on(p, lambda: layers, settings(**keys), batches or data())
    return str(caught.value)


class Marked(torch.Tensor):
    """A tensor with methods of its own."""


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (lambda x: None, "layer 0 (Only) returned a NoneType without any tensor"),
        (lambda x: {"a": [3, ()]}, "layer 0 (Only) returned a dict without any tensor"),
        (lambda x: (x, {1, 2}), "layer 0 (Only) returned a set; a layer of a pipeline returns a tensor, or tuples"),
        (lambda x: x.numpy(), "layer 0 (Only) returned a numpy.ndarray; a layer of a pipeline returns a tensor"),
        (lambda x: (x, slice(2)), "layer 0 (Only) returned a slice"),
        (lambda x: x.to_sparse(), "layer 0 (Only) returned a tensor of layout torch.sparse_coo; only dense ones"),
        (lambda x: x.as_subclass(Marked), "layer 0 (Only) returned a tensor of class Marked; only plain ones go"),
        (lambda x: [x, x.as_subclass(Marked)], "layer 0 (Only) returned a tensor of class Marked; only plain ones go"),
    ],
)
def test_values_that_can_not_go_from_layer_to_layer(value: Callable[[Any], Any], text: str, p: int) -> None:
    assert refused([only(value), little.linear()], p).startswith(text)


def test_a_parameter_and_what_inference_mode_made_cross() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(W))

        def forward(self, x: torch.Tensor) -> Any:
            return x, self.scale

    def features(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return x.sin()

    layers = [only(features), Scale, apply(lambda f, v: (f(v[0]) * v[1], v[1])), apply(lambda f, v: f(v[0]) - v[1])]
    everywhere(layers)


def test_a_named_tuple_s_class_that_is_found_nowhere_is_told() -> None:
    class Hidden(NamedTuple):
        x: torch.Tensor

    layers = [apply(lambda f, x: Hidden(f(x))), apply(lambda f, v: f(v.x))]
    text = refused(layers)
    assert "0SEND_F0 holds what can't go to another rank" in text
    assert "the class of a named tuple must be found by its name in a module" in text
    everywhere(layers, cuts=())


def _calls(values: Callable[[int], Any]) -> Callable[[], nn.Module]:
    """A layer that returns a value of the number of its call beside its output."""

    class Telling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(W, W)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> Any:
            self.calls += 1
            return {"x": self.linear(x), "value": values(self.calls - 1)}

    return Telling


def _takes(f: nn.Module, v: dict[str, Any]) -> torch.Tensor:
    value = v["value"]
    return f(v["x"]) * (math.copysign(2.0, value) if isinstance(value, float) else len(repr(value)))


@pytest.mark.parametrize("value", [3, -0.0, None, True, "text", b"text", 2j, ("a", [1, None]), {"k": 2.5}], ids=repr)
def test_a_constant_beside_tensors_crosses(value: object) -> None:
    everywhere([_calls(lambda _: value), apply(_takes), little.linear(), little.linear()])


def test_a_new_nan_for_every_microbatch_is_a_constant() -> None:
    everywhere([_calls(lambda _: [float("nan")]), apply(_takes), little.linear(), little.linear()])


@pytest.mark.parametrize("later", [2, 1.0, True, None, "1", -1, [1], {"k": 1}], ids=repr)
def test_a_value_that_changes_is_refused_and_never_an_old_one(later: object) -> None:
    """From one microbatch to the next, and from step to step."""
    for first in (1, 3):
        layers = [_calls(lambda call, first=first: 1 if call < first else later), apply(_takes)]
        text = refused(layers)
        assert f"0SEND_F{first % 3} has the structure {{'x': tensor, 'value': " in text
        assert "and had {'x': tensor, 'value': 1}" in text


def test_zero_and_minus_zero_are_two_values() -> None:
    assert "'value': -0.0}, and had {'x': tensor, 'value': 0.0}" in refused(
        [_calls(lambda call: (0.0, -0.0)[call % 2]), apply(_takes)]
    )


@pytest.mark.parametrize("change", [lambda v: (v["b"], v["a"]), lambda v: {"b": v["b"], "a": v["a"]}, lambda v: v["a"]])
def test_another_structure_for_a_later_microbatch_is_refused(change: Callable[[Any], Any]) -> None:
    calls: list[int] = []

    def value(f: nn.Module, x: torch.Tensor) -> Any:
        calls.append(1)
        known = {"a": f(x), "b": x}
        return known if len(calls) == 1 else change(known)

    text = refused([apply(value), apply(lambda f, v: f(v["a"]))])
    assert "0SEND_F1 has the structure" in text
    assert "and had {'a': tensor, 'b': tensor}" in text


def test_a_shape_that_hangs_on_the_contents_is_refused() -> None:
    layers = [apply(lambda f, x: f(x[x[:, 0] > 0])), little.linear()]
    assert "has shape (" in refused(layers)


# --- shapes ---


def lengths(step: int, rows: int, length: int) -> Any:
    x, y = little.batch(step, rows, length, W)
    return {"x": x, "keep": x[..., 0] > 0}, y


SIZES = ((5, 4), (5, 7), (2, 4), (5, 4), (1, 9), (6, 7), (5, 7))
"""(Rows, length) of each step's batch."""


def _headers(schedule: str, chunks: int, p: int, shapes: Sequence[tuple[int, int]]) -> list[int]:
    """Headers that all ranks sent in each step, then in two evaluations of the first batch."""
    layers = [
        apply(lambda f, v: {"x": f(v["x"]), "keep": v["keep"]}),
        *[apply(lambda f, v: {"x": f(v["x"]) * v["keep"][..., None], "keep": v["keep"]}) for _ in range(2)],
        apply(lambda f, v: f(v["x"])),
    ]
    batches = [lengths(step, *shape) for step, shape in enumerate(shapes)]

    def run(transport: Transport) -> list[int]:
        spy = spying.Spy(transport)
        trainer = Trainer(settings(schedule, chunks), layers, little.square_loss, transport=spy)
        seen = []
        for batch in batches:
            trainer.step(batch)
            seen.append(spy.headers)
        for _ in range(2):
            trainer.evaluate(batches[:1])
            seen.append(spy.headers)
        return [after - before for before, after in zip([0, *seen], seen, strict=False)]

    return [sum(counts) for counts in zip(*run_ranks(p, run), strict=True)]


@pytest.mark.parametrize("p, schedule, chunks, borders", [(2, "1f1b", 1, 1), (4, "zb-h1", 1, 3), (2, "zb-v", 2, 2)])
def test_headers_go_once_for_each_new_signature(p: int, schedule: str, chunks: int, borders: int) -> None:
    """Before each activation of the run in which it is new: (2, 4) is the size of microbatches seen before."""
    found = _headers(schedule, chunks, p, SIZES)
    news = [3, 3, 0, 0, 1, 0, 0, 3, 0]
    assert found == [count * borders for count in news]


def test_lengths_that_differ_from_step_to_step_have_one_rank_s_bits() -> None:
    layers = [
        apply(lambda f, v: {"x": f(v["x"]), "keep": v["keep"], "n": v["x"].shape[1]}),
        apply(lambda f, v: {**v, "x": f(v["x"]) * v["keep"][..., None]}),
        apply(lambda f, v: {**v, "x": f(v["x"]) / v["n"]}),
        apply(lambda f, v: f(v["x"])),
    ]
    everywhere(layers, [lengths(step, *size) for step, size in enumerate(SIZES)])


def test_a_header_longer_than_its_first_message() -> None:
    def long(f: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {f"a rather long key of the tensor number {k}": f(x) * k for k in range(100)}

    layers = [apply(long), only(lambda v: v), only(lambda v: v), apply(lambda f, v: f(sum(v.values())))]
    everywhere(layers)


def test_other_outputs_in_evaluation_than_in_training() -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(W, W)

        def forward(self, v: Any) -> Any:
            x = v if isinstance(v, torch.Tensor) else v[0]
            return (self.linear(x), self.linear(x)[:, :2]) if self.training else self.linear(x)

    everywhere([*[Moody] * 4, only(lambda v: v if isinstance(v, torch.Tensor) else v[0] + v[1].sum())])


def test_inputs_that_no_layer_can_take() -> None:
    with pytest.raises(DataError, match=r"a batch holds a builtins\.set"):
        little.train_on(1, lambda: [little.linear()], settings(), [((torch.ones(2, W), {1}), torch.ones(2, W))])


class Recalling(nn.Module):
    """Keeps its input and takes it for the next microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) if self.last is None else self.linear(x + self.last[: len(x)].mean(0))
        self.last = x.detach()
        return y


def test_a_layer_that_keeps_its_input_finds_it_as_it_was() -> None:
    """On another rank it is a buffer, which the next message would fill."""
    batches = [little.batch(step, 12) for step in range(3)]
    layers = [little.linear(), Recalling, Recalling, Recalling]
    everywhere(layers, batches, cuts=[(2, "1f1b", 1), (4, "1f1b", 1), (2, "interleaved", 2), (3, "gpipe", 1)])


@pytest.mark.parametrize(
    "p, schedule, chunks", [(4, "1f1b", 1), (4, "zb-h1", 1), (2, "zb-v", 2), (2, "interleaved", 2)]
)
def test_buffers_that_nobody_keeps_are_used_again(p: int, schedule: str, chunks: int) -> None:
    layers = [
        apply(lambda f, x: (f(x), x > 0)),
        *[apply(lambda f, v: (f(v[0]).tanh(), v[1])) for _ in range(2)],
        apply(lambda f, v: f(v[0]) * v[1]),
    ]

    def run(transport: Transport) -> list[int]:
        trainer = Trainer(settings(schedule, chunks), layers, little.square_loss, transport=transport)
        found = []
        for batch in data(5):
            trainer.step(batch)
            trainer.evaluate([batch])
            found.append(trainer._engine.mail.pool.allocated_buffers)
        return found

    for _, *later in run_ranks(p, run):
        assert later == [later[0]] * 4


def test_a_hook_on_totals_is_refused_with_its_parameter() -> None:
    """Torch calls it once a backward, so with the total of some microbatches: an update in it would train on parts."""

    class Updates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(little.WIDTH, little.WIDTH)
            self.linear.weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    def work(transport: Transport) -> None:
        trainer = Trainer(little.config(), [little.linear(), Updates], little.square_loss, transport=transport)
        with pytest.raises((EngineError, TransportError)) as caught:
            trainer.step(little.batch(0))
        if transport.rank == transport.size - 1:
            assert "parameter 1.linear.weight has a post-accumulate hook" in str(caught.value)

    work(solo())
    run_ranks(2, work)
