"""AdamW over a rank's own parameters, by torch's fused kernel."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mpipipe.config import Config


class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter 2019), on float32 parameters, with all parameters at the same step.

    ``parameters``: global name to leaf tensor. The moments exist from the start, as zeros of the parameter's shape, so
    that a checkpoint of step 0 holds the same names as any other. The optimizer owns the moments; ``moments`` hands
    them out in place.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], config: Config) -> None:
        section = config.optimizer
        self._parameters = dict(parameters)
        decayed = [p for p in self._parameters.values() if section.decay == "all" or p.dim() >= 2]
        plain = [p for p in self._parameters.values() if not (section.decay == "all" or p.dim() >= 2)]
        groups = [
            {"params": members, "weight_decay": decay}
            for members, decay in ((decayed, section.weight_decay), (plain, 0.0))
            if members
        ]
        self._torch = (
            torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)
            if groups
            else None
        )
        self.steps_done = 0
        for parameter in self._parameters.values():
            self._state(parameter).update(
                step=torch.zeros((), dtype=torch.float32, device=parameter.device),
                exp_avg=torch.zeros_like(parameter, memory_format=torch.contiguous_format),
                exp_avg_sq=torch.zeros_like(parameter, memory_format=torch.contiguous_format),
            )

    def _state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        assert self._torch is not None
        state: dict[str, torch.Tensor] = self._torch.state[parameter]
        return state

    def step(self, gradients: Mapping[str, torch.Tensor], rate: float) -> None:
        """Update every parameter in place. ``gradients``: float32, of the parameter's shape, one for every name; left
        as they are.
        """
        self.steps_done += 1
        if self._torch is None:
            return
        for group in self._torch.param_groups:
            group["lr"] = rate
        for name, parameter in self._parameters.items():
            parameter.grad = gradients[name]
        self._torch.step()
        for parameter in self._parameters.values():
            parameter.grad = None

    def moments(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """First and second moment of one parameter, shared with the optimizer."""
        state = self._state(self._parameters[name])
        return state["exp_avg"], state["exp_avg_sq"]

    def set_steps_done(self, steps: int) -> None:
        """Go on as after ``steps`` updates (they enter the bias correction)."""
        self.steps_done = steps
        for parameter in self._parameters.values():
            self._state(parameter)["step"].fill_(float(steps))
