"""The learning rate as a pure function of the step: nothing to save, nothing that can drift from what the optimizer
uses.
"""

from __future__ import annotations

import math

from mpipipe.config import Config


def learning_rate(config: Config, step: int) -> float:
    """The rate of the update that turns ``step`` done steps into ``step + 1``.

    Rises linearly to ``optimizer.lr`` over ``lr.warmup_steps`` steps, then stays (``constant``), or falls to
    ``lr.min_lr`` at the run's last step, ``run.steps``, on a line or half a cosine (Loshchilov and Hutter 2017, SGDR,
    equation 5). ``run.steps`` changed at a resume: the course of the new length from there on.
    """
    peak, warmup, last = config.optimizer.lr, config.lr.warmup_steps, config.lr.min_lr
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.lr.schedule == "constant":
        return peak
    span = max(1, config.run.steps - 1 - warmup)
    done = min(1.0, (step - warmup) / span)
    if config.lr.schedule == "linear":
        return peak * (1.0 - done) + last * done
    return last + (peak - last) * 0.5 * (1.0 + math.cos(math.pi * done))
