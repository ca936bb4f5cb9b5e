"""One stage by itself: layer by layer, against autograd over the whole chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import little
import pytest
import torch
from torch import nn

from mpipipe.device import ALIGNMENT, HostDevice
from mpipipe.errors import EngineError
from mpipipe.model import Draw
from mpipipe.stage import Activation, MicrobatchKey, Stage, StageLayer

KEY = MicrobatchKey(0, Draw(1, 0, (0, 1, 2, 3)))


def stage_of(modules: Sequence[nn.Module], loss: object = little.square_loss, first: int = 0) -> Stage:
    layers = [StageLayer(module, first + k, str(first + k)) for k, module in enumerate(modules)]
    return Stage(0, layers, HostDevice(), loss)


def step(stage: Stage, inputs: object, target: object, microbatch: int = 0, *, first: bool = True) -> object:
    key = MicrobatchKey(microbatch, KEY.draw)
    output = stage.forward(inputs if first else Activation((inputs,), (True,)), key)
    total, count = stage.loss(microbatch, output, target, keep=True)
    gradients = stage.backward(microbatch, None)
    return gradients[0] if gradients else None, total, count


def totals(stage: Stage) -> dict[str, torch.Tensor]:
    return {
        name: gradient.finish().clone()
        for layer in stage.layers
        for name, gradient in zip(layer.names, layer.gradients, strict=True)
    }


def expected(modules: Sequence[nn.Module], inputs: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    chain = nn.Sequential(*modules)
    chain.zero_grad()
    little.square_loss(chain(inputs), target)[0].backward()
    return {name: p.grad.clone() for name, p in chain.named_parameters() if p.grad is not None}


def chain(depth: int = 5) -> list[nn.Module]:
    torch.manual_seed(3)
    modules: list[nn.Module] = []
    for _ in range(depth):
        modules += [nn.Linear(16, 16), nn.Tanh()]
    return modules


def data(seed: int = 0, width: int = 16, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator), torch.randn(rows, width, generator=generator)


def test_a_chain_of_linear_layers_has_autograd_s_bits() -> None:
    modules = chain()
    inputs, target = data()
    stage = stage_of(modules)
    gradient, total, count = step(stage, inputs, target)
    want = expected(modules, inputs, target)
    found = totals(stage)
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(found[name], value), name
    assert gradient is None
    assert count == 4
    assert not total.requires_grad
    assert stage.live == 0


def test_microbatches_may_be_open_side_by_side_and_add_up_in_the_order_of_backwards() -> None:
    modules = chain()
    stage = stage_of(modules)
    batches = [data(seed) for seed in range(3)]
    for k, (inputs, target) in enumerate(batches):
        output = stage.forward(inputs, MicrobatchKey(k, KEY.draw))
        stage.loss(k, output, target, keep=True)
    assert stage.live == 3
    want: dict[str, torch.Tensor] = {}
    for k in (1, 0, 2):
        stage.backward(k, None)
        for name, value in expected(modules, *batches[k]).items():
            want[name] = want[name] + value if name in want else value
    assert stage.live == 0
    for name, value in totals(stage).items():
        assert torch.equal(value, want[name])


def test_the_gradient_of_the_input_of_a_later_stage() -> None:
    modules = chain(2)
    inputs, target = data()
    gradient, _, _ = step(stage_of(modules), inputs.clone(), target, first=False)
    leaf = inputs.clone().requires_grad_()
    little.square_loss(nn.Sequential(*modules)(leaf), target)[0].backward()
    assert torch.equal(gradient, leaf.grad)
    assert gradient.is_contiguous()
    assert gradient.data_ptr() % ALIGNMENT == 0


class Twice(nn.Module):
    """Uses its weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) @ self.weight


class Idle(nn.Module):
    """Has a parameter that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(16, 16)
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def test_a_parameter_used_twice_counts_twice() -> None:
    torch.manual_seed(0)
    modules = [nn.Linear(16, 16), Twice()]
    inputs, target = data()
    stage = stage_of(modules)
    step(stage, inputs, target)
    want = expected(modules, inputs, target)
    assert torch.equal(totals(stage)["1.weight"], want["1.weight"])


def test_an_unused_parameter_has_gradient_zero_in_every_step() -> None:
    modules = [nn.Linear(16, 16), Idle()]
    stage = stage_of(modules)
    for seed in range(2):
        step(stage, *data(seed), microbatch=seed)
    found = totals(stage)
    assert found["1.idle"].tolist() == [0.0, 0.0, 0.0]
    assert float(found["1.used.weight"].abs().sum()) > 0


@pytest.mark.parametrize("frozen", [{0}, {1}, {2}, {0, 1}, {1, 2}, {0, 2}])
def test_frozen_layers_take_nothing_and_the_others_all(frozen: set[int]) -> None:
    torch.manual_seed(0)
    modules = [nn.Linear(16, 16) for _ in range(3)]
    for index in frozen:
        modules[index].requires_grad_(False)
    inputs, target = data()
    stage = stage_of(modules)
    step(stage, inputs, target)
    want = expected(modules, inputs, target)
    found = totals(stage)
    assert found.keys() == want.keys() == {f"{k}.{x}" for k in {0, 1, 2} - frozen for x in ("weight", "bias")}
    for name, value in want.items():
        assert torch.equal(found[name], value)


def test_integers_in_and_no_parameters_before_the_first_weight() -> None:
    torch.manual_seed(0)
    modules = [nn.Flatten(), nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 2)]
    inputs = torch.tensor([[[1, 2, 6]], [[0, 0, 3]]])
    target = torch.randn(2, 2)
    stage = stage_of(modules)
    gradient, _, _ = step(stage, inputs, target)
    assert gradient is None
    want = expected(modules, inputs, target)
    for name, value in totals(stage).items():
        assert torch.equal(value, want[name])


def test_a_layer_that_cuts_the_graph_gives_zeros_upstream() -> None:
    class Cut(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.detach() * 2

    modules = [nn.Linear(16, 16), Cut(), nn.Linear(16, 16)]
    stage = stage_of(modules)
    gradient, _, _ = step(stage, *data(), first=False)
    found = totals(stage)
    assert float(found["0.weight"].abs().sum()) == 0.0
    assert float(found["2.weight"].abs().sum()) > 0.0
    assert gradient.tolist() == torch.zeros(4, 16).tolist()


def test_the_output_and_what_is_kept_are_contiguous_and_aligned() -> None:
    class Strided(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.is_contiguous()
            assert x.data_ptr() % ALIGNMENT == 0
            return torch.cat([x, x], 1)[:, 1 : 1 + x.shape[1]]

    (output,) = stage_of([Strided(), Strided(), Strided()], None).forward(data()[0], KEY).tensors
    assert output.is_contiguous()
    assert output.data_ptr() % ALIGNMENT == 0
    assert not output.requires_grad


def test_no_valid_label_is_no_gradient() -> None:
    """A loss of a constant, and one whose sum hangs on nothing."""

    def constant(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        return torch.zeros(()), 0

    def masked(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        valid = target[:, 0] > 99
        return (output - target)[valid].square().sum(), valid.sum()

    for loss in (constant, masked):
        stage = stage_of(chain(2), loss)
        _, total, count = step(stage, *data())
        assert (float(total), count) == (0.0, 0)
        assert all(float(value.abs().sum()) == 0.0 for value in totals(stage).values())


def test_an_evaluation_keeps_nothing_and_gives_the_forward_s_bits() -> None:
    stage = stage_of(chain())
    inputs, target = data()
    evaluated = stage.evaluate(inputs, MicrobatchKey(0, None))
    total, count = stage.loss(0, evaluated, target, keep=False)
    assert stage.live == 0
    assert not total.requires_grad
    trained = stage.forward(inputs, KEY)
    assert torch.equal(evaluated.tensors[0], trained.tensors[0])
    assert stage.live == 1
    stage.drop_kept()
    assert stage.live == 0
    assert count == 4


class Broken(nn.Module):
    """Fails in its forward, or in its backward."""

    def __init__(self, forward: bool) -> None:
        super().__init__()
        self.fails = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("here")
        y = x * 2

        def hook(gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("there")

        y.register_hook(hook)
        return y


def test_a_fault_names_the_layer_by_its_class_where_it_has_no_name() -> None:
    with pytest.raises(ValueError, match="here") as caught:
        step(stage_of([nn.Linear(16, 16), Broken(True)], first=2), *data())
    assert caught.value.__notes__ == ["mpipipe: in layer 3 (Broken), stage 0, microbatch 0"]
    with pytest.raises(ValueError, match="there") as caught:
        step(stage_of([nn.Linear(16, 16), Broken(False)]), *data())
    assert caught.value.__notes__ == ["mpipipe: in the backward of layer 1 (Broken), microbatch 0"]
    named = Stage(0, [StageLayer(Broken(True), 0, "blocks.0")], HostDevice(), little.square_loss)
    with pytest.raises(ValueError, match="here") as caught:
        step(named, *data())
    assert caught.value.__notes__ == ["mpipipe: in layer 0 (blocks.0), stage 0, microbatch 0"]


@dataclass(frozen=True)
class Fixed(Exception):
    """Takes no attribute, and so no note."""

    what: str


class Raises(nn.Module):
    """Raises in its forward, or in its backward."""

    def __init__(self, error: BaseException, forward: bool) -> None:
        super().__init__()
        self.error = error
        self.in_forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_forward:
            raise self.error
        y = x * 2
        y.register_hook(self.hook)
        return y

    def hook(self, gradient: torch.Tensor) -> None:
        raise self.error


@pytest.mark.parametrize("forward", [True, False])
def test_an_error_that_takes_no_note_stays_what_it_is(forward: bool) -> None:
    with pytest.raises(Fixed) as caught:
        step(stage_of([nn.Linear(16, 16), Raises(Fixed("hot"), forward)]), *data())
    assert caught.value.what == "hot"

    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        raise Fixed("cold")

    with pytest.raises(Fixed):
        step(stage_of(chain(1), loss), *data())


@pytest.mark.parametrize("forward", [True, False])
def test_sys_exit_in_a_layer_says_where_and_an_interrupt_takes_no_lines(forward: bool) -> None:
    with pytest.raises(SystemExit) as caught:
        step(stage_of([nn.Linear(16, 16), Raises(SystemExit(3), forward)]), *data())
    where = "layer 1 (Raises), stage 0" if forward else "the backward of layer 1 (Raises)"
    assert caught.value.code == 3
    assert caught.value.__notes__ == [f"mpipipe: in {where}, microbatch 0"]
    with pytest.raises(KeyboardInterrupt) as interrupted:
        step(stage_of([nn.Linear(16, 16), Raises(KeyboardInterrupt(), forward)]), *data())
    assert not hasattr(interrupted.value, "__notes__")


def test_the_batch_itself_stays_as_it_is() -> None:
    inputs, target = data()
    given = inputs.clone().requires_grad_()
    step(stage_of(chain(2)), given, target)
    assert given.grad is None
    assert torch.equal(given.detach(), inputs)


class ToFrequencies(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(x)


class FromFrequencies(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(x, n=16)


def test_the_gradient_passes_layers_of_complex_numbers() -> None:
    torch.manual_seed(3)
    modules = [nn.Linear(16, 16), ToFrequencies(), FromFrequencies(), nn.Linear(16, 16)]
    inputs, target = data()
    stage = stage_of(modules)
    step(stage, inputs, target)
    want = expected(modules, inputs, target)
    found = totals(stage)
    assert float(want["0.weight"].abs().max()) > 0
    for name, value in want.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize(
    "count, taken",
    [
        (4, 4),
        (torch.tensor(4), 4),
        (torch.tensor([4.0]), 4),
        (torch.tensor(0.0), 0),
        (torch.tensor(2.75), None),
        (torch.tensor(-1), None),
        (torch.tensor(torch.nan), None),
        (torch.ones(2), None),
        (None, None),
    ],
)
def test_what_is_counted_is_a_whole_number(count: object, taken: int | None) -> None:
    """B02: a sum of weights such as 2.75 would be cut to 2, and the loss be too large by that, in silence."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, object]:
        return little.square_loss(output, target)[0], count

    if taken is not None:
        assert step(stage_of(chain(1), loss), *data())[2] == taken
        return
    with pytest.raises(EngineError, match=r"loss function (returned a sum over|must return)"):
        step(stage_of(chain(1), loss), *data())


def test_a_loss_without_a_gradient_is_refused_and_not_trained_on() -> None:
    """A step would go on with zeros, and the loss would stay where it is."""

    def detached(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        return little.square_loss(output.detach(), target)

    stage = stage_of(chain(1), detached)
    with pytest.raises(EngineError, match="sum over 4 items has no gradient"):
        step(stage, *data())
    output = stage.evaluate(data()[0], MicrobatchKey(0, None))
    assert stage.loss(0, output, data()[1], keep=False)[1] == 4
