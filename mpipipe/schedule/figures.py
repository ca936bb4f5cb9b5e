"""The figures of a simulated table as one JSON object (the keys of ``mpipipe schedule show --json``)."""

from __future__ import annotations

from typing import Any

from mpipipe.schedule.simulate import Simulation
from mpipipe.schedule.table import ScheduleTable

_NUMBERS = ("latency", "makespan", "bubble_fraction", "lower_bound")
_LISTS = ("busy", "span")


def figures(table: ScheduleTable, simulation: Simulation, *, rows: bool = True) -> dict[str, Any]:
    """Plain numbers, lists and text, ready for ``json.dumps``: p, v, m, placement, compute-only rows, costs, times,
    peaks, messages.
    Without ``rows`` the same but these.

    Times are in the costs' unit; whole numbers are int. ``rows`` come from the compute-only table that was simulated.
    """
    done = simulation.table
    result: dict[str, Any] = {
        "schedule": table.name,
        "p": table.p,
        "v": table.v,
        "m": table.m,
        "stages": table.num_stages,
        "placement": _placement(table),
        **({"rows": done.rows()} if rows else {}),
        "costs": _costs(simulation),
    }
    for name in _NUMBERS:
        result[name] = _plain(getattr(simulation, name))
    for name in _LISTS:
        result[name] = [_plain(value) for value in getattr(simulation, name).tolist()]
    result["peak_activations"] = simulation.peak_activations.tolist()
    result["peak_until_input_gradient"] = simulation.peak_until_input_gradient.tolist()
    result["messages"] = simulation.messages
    result["ordered"] = done.ordered
    return result


def _costs(simulation: Simulation) -> dict[str, Any]:
    """F, I and W; FB where it is given."""
    costs = simulation.costs
    names = ("F", "I", "W") if costs.FB is None else ("F", "I", "W", "FB")
    return {name: _plain(getattr(costs, name)) for name in names}


def _placement(table: ScheduleTable) -> list[Any]:
    """The rank of each stage, or a list of two where a stage has two copies."""
    if table.mirror is None:
        return list(table.placement)
    return [list(both) for both in zip(table.placement, table.mirror, strict=True)]


def _plain(value: Any) -> Any:
    if hasattr(value, "__len__"):
        return [_plain(one) for one in value]
    number = float(value)
    return int(number) if number.is_integer() else number
