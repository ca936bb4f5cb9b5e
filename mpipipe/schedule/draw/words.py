"""Text in pictures: names from files made harmless to print, and figures in words."""

from __future__ import annotations

import re

from mpipipe.schedule.simulate import Simulation

_NOT_PRINTABLE = re.compile(
    "[^\t -~\u00a0-\ud7ff\ue000-\ufdcf\ufdf0-\ufffd\U00010000-\U0010fffd]|[\u202a-\u202e\u2066-\u2069]"
)


def printable(text: str) -> str:
    """``text`` with what XML, a terminal or the direction of writing could trip over replaced by U+FFFD: control
    characters, half surrogates, non-characters."""
    return _NOT_PRINTABLE.sub("\ufffd", text).replace("\t", " ")


def shortened(text: str, most: int) -> str:
    """``text`` in at most ``most`` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def figures_words(simulation: Simulation) -> str:
    """``makespan 33, bubble fraction 0.273, no schedule is shorter than 33 (makespan / bound 1.000)``."""
    bound = simulation.lower_bound
    over = f" (makespan / bound {simulation.makespan / bound:.3f})" if bound > 0 else ""
    return (
        f"makespan {simulation.makespan:g}, bubble fraction {simulation.bubble_fraction:.3f}, "
        f"lower bound {bound:g}{over}"
    )


def costs_words(simulation: Simulation) -> str:
    """``F = 1, I = 1, W = 1, latency 2``."""
    costs = simulation.costs
    parts = []
    for name in ("F", "I", "W"):
        cost = getattr(costs, name)
        parts.append(f"{name} = {cost:g}" if isinstance(cost, int | float) else f"{name} by stage")
    if costs.FB is not None:
        parts.append(f"F and B at once = {costs.FB:g}")
    if simulation.latency:
        parts.append(f"latency {simulation.latency:g}")
    return ", ".join(parts)
