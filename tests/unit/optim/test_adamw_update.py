"""Our AdamW against torch's plain one."""

from __future__ import annotations

import little
import pytest
import torch

from mpipipe.optim import AdamW


def parameters(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"matrix": (7, 5), "vector": (11,), "cube": (2, 3, 4), "scalar": (), "large": (300, 257)}
    return {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in parameters(100 + step).items()}


@pytest.mark.parametrize("decay", ["matrices", "all"])
def test_ten_steps_follow_torch(decay: str) -> None:
    config = little.config(
        optimizer__decay=decay, optimizer__weight_decay=0.3, optimizer__betas=[0.8, 0.97], optimizer__eps=1e-6
    )
    ours, theirs = parameters(), parameters()
    optimizer = AdamW(ours, config)
    decayed = [p for p in theirs.values() if decay == "all" or p.dim() >= 2]
    plain = [p for p in theirs.values() if not (decay == "all" or p.dim() >= 2)]
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0}]
    reference = torch.optim.AdamW([g for g in groups if g["params"]], betas=(0.8, 0.97), eps=1e-6, foreach=False)
    for step in range(10):
        rate = 0.05 / (step + 1)
        found = gradients(step)
        optimizer.step(found, rate)
        for group in reference.param_groups:
            group["lr"] = rate
        for name, parameter in theirs.items():
            parameter.grad = gradients(step)[name]
            assert torch.equal(found[name], parameter.grad), "the gradients stay as they are"
        reference.step()
    assert optimizer.steps_done == 10
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=2e-6, atol=1e-6)
        first, second = optimizer.moments(name)
        torch.testing.assert_close(first, reference.state[theirs[name]]["exp_avg"], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(second, reference.state[theirs[name]]["exp_avg_sq"], rtol=1e-6, atol=1e-7)
        assert parameter.grad is None


def test_the_first_step_is_the_learning_rate_long() -> None:
    """At step 1 the update is lr * sign(gradient), and the decay lr * weight_decay * weight."""
    weight = torch.tensor([[2.0, -4.0]]).requires_grad_()
    optimizer = AdamW({"w": weight}, little.config(optimizer__weight_decay=0.5, optimizer__eps=1e-12))
    optimizer.step({"w": torch.tensor([[3.0, -0.001]])}, 0.1)
    torch.testing.assert_close(weight.detach(), torch.tensor([[2.0 - 0.1 - 0.1, -4.0 + 0.1 + 0.2]]))


def test_moments_exist_from_the_start_and_are_shared() -> None:
    made = parameters()
    optimizer = AdamW(made, little.config())
    first, second = optimizer.moments("matrix")
    assert first.shape == second.shape == (7, 5)
    assert float(first.abs().sum() + second.abs().sum()) == 0.0
    optimizer.step(gradients(0), 1e-3)
    assert float(first.abs().sum()) > 0.0
    assert optimizer.moments("matrix")[0] is first


def test_going_on_from_copied_state_equals_never_having_stopped() -> None:
    whole = parameters()
    straight = AdamW(whole, little.config())
    for step in range(6):
        straight.step(gradients(step), 0.01)
    half = parameters()
    earlier = AdamW(half, little.config())
    for step in range(3):
        earlier.step(gradients(step), 0.01)
    taken = {name: value.detach().clone().requires_grad_() for name, value in half.items()}
    later = AdamW(taken, little.config())
    for name in taken:
        for ours, theirs in zip(later.moments(name), earlier.moments(name), strict=True):
            ours.copy_(theirs)
    later.set_steps_done(3)
    for step in range(3, 6):
        later.step(gradients(step), 0.01)
    assert later.steps_done == 6
    for name, value in whole.items():
        assert torch.equal(taken[name], value)


def test_without_parameters_only_the_count_goes_on() -> None:
    optimizer = AdamW({}, little.config())
    optimizer.step({}, 0.1)
    optimizer.set_steps_done(4)
    optimizer.step({}, 0.1)
    assert optimizer.steps_done == 5
