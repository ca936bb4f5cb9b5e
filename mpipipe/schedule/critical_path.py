"""What the makespan is made of: the chain of actions and waits that ends last.

Letters: A = number of actions. Times are in the unit of the costs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpipipe.schedule.action import Kind
from mpipipe.schedule.simulate import Simulation


def critical_path(simulation: Simulation) -> NDArray[np.int64]:
    """Flat indices of a chain of actions from the start of the step to the end of the last action, int64 (n,).

    Each action of the chain starts when the one before it in the chain has ended, or when its message arrives; the
    first starts at 0. Where an action could have started no earlier for two reasons, the message counts. Of an
    overlapped pair the action that waited is named. The lengths of the chain's actions and messages add up to the
    makespan: to shorten the step, one of them must become shorter.
    """
    table = simulation.table
    if not table.num_actions:
        return np.empty(0, dtype=np.int64)
    first = set(table.offsets[:-1].tolist())
    partner = {}
    for pair in table.overlaps.tolist():
        partner[pair], partner[pair + 1] = pair + 1, pair
    start, end, needs = simulation.start, simulation.end, simulation.needs
    delays = simulation.hops.per_stage(table.num_stages)
    here = int(np.argmax(end))
    chain = [here]
    while start[here] > 0:
        both = [here, partner[here]] if here in partner else [here]
        late = [one for one in both if needs[one] >= 0 and _arrives(simulation, one, delays) >= start[here]]
        if late:
            chain[-1] = late[0]
            here = int(needs[late[0]])
        else:
            leader = min(both)
            if leader in first:
                break
            here = leader - 1
        chain.append(here)
    return np.array(chain[::-1], dtype=np.int64)


def _arrives(simulation: Simulation, index: int, delays: NDArray[np.float64]) -> float:
    """When what an action waits for is there, as in ``simulate``: the sum is the same to the last bit."""
    table = simulation.table
    stage = int(table.stages[index])
    delay = delays[stage - 1 if table.kinds[index] == Kind.F else stage]
    return float(simulation.end[simulation.needs[index]] + delay)
