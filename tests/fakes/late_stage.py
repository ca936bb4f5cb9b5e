"""A stage whose every method is a kernel of a ``LateDriver``."""

from __future__ import annotations

from typing import Any

from fakes.late import LateDriver, Span, spans

from mpipipe.stage import Activation, Stage


def late_stage(stage: Stage, driver: LateDriver) -> Stage:
    """The stage itself, its methods replaced: each computes at once, as ever, and issues a kernel that reads what it
    was given. A backward reads the stage's input and the gradients, the weight half once more.
    """
    given: dict[int, list[Span]] = {}

    def reading(inputs: object) -> list[Span]:
        return spans(inputs.tensors) if isinstance(inputs, Activation) else []

    def replace(name: str, reads: Any) -> None:
        method = getattr(stage, name)

        def late(*args: Any, **options: Any) -> Any:
            found = reads(*args)
            try:
                return method(*args, **options)
            finally:
                driver.kernel(found)

        setattr(stage, name, late)

    def forward(inputs: object, key: Any) -> list[Span]:
        given[key.microbatch] = reading(inputs)
        return given[key.microbatch]

    def gradients(microbatch: int, found: Any) -> list[Span]:
        return given.get(microbatch, []) + spans(one for one in found or () if one is not None)

    def backward(microbatch: int, found: Any) -> list[Span]:
        read = gradients(microbatch, found)
        given.pop(microbatch, None)
        return read

    def backward_input(microbatch: int, found: Any) -> list[Span]:
        given[microbatch] = gradients(microbatch, found)
        return given[microbatch]

    replace("forward", forward)
    replace("evaluate", lambda inputs, key: reading(inputs))
    replace("loss", lambda *args: [])
    replace("backward", backward)
    replace("backward_input", backward_input)
    replace("backward_weight", lambda microbatch: given.pop(microbatch, []))
    return stage
