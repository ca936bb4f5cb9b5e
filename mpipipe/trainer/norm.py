"""The norm of the whole gradient, the same float on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from mpipipe import collectives
from mpipipe.trainer.build import RankModel
from mpipipe.transport import Transport


def gradient_norm(
    model: RankModel, transport: Transport, squares: Mapping[str, float]
) -> tuple[float, str | None]:
    """The norm, and the first parameter whose gradient is not finite. Collective.

    ``squares``: sum of squares of each of this rank's gradients. Every weight is counted once by its owner, and all are
    added in layer order.
    """
    everything, rank = model.everything, transport.rank
    width = max((sum(info.owner == r for info in everything) for r in range(transport.size)), default=0)
    mine = np.zeros(width, dtype=np.float64)
    own = [squares[info.name] for info in everything if info.owner == rank]
    mine[: len(own)] = own
    rows = collectives.all_gather(transport, mine)
    position = [0] * transport.size
    total, first_bad = 0.0, None
    for info in everything:
        value = float(rows[info.owner, position[info.owner]])
        position[info.owner] += 1
        total += value
        if first_bad is None and not math.isfinite(value):
            first_bad = info.name
    return math.sqrt(total) if total >= 0 else total, first_bad
