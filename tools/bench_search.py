"""What the schedule search finds, beside the plain greedy rule: figures for docs and issues. Needs numpy only.

python tools/bench_search.py [--chunks]

p = 8 ranks, m = 32 microbatches; costs F, I, W of one stage; cap: most activations of a rank until their W, of one
chunk. ``greedy``: whenever a rank is free, I before F before W, F while the cap allows. Gaps are over the lower bound
of the search, seconds are of one core.
"""

from __future__ import annotations

import argparse
import time

from mpipipe.schedule import Costs, Hops
from mpipipe.schedule.search import search
from mpipipe.schedule.search.list_schedule import Rule, list_schedule
from mpipipe.schedule.search.problem import make_problem
from mpipipe.topology import loop_placement, zigzag_placement

P, M = 8, 32
BY_RANK = [P - rank for rank in range(P)]


def main() -> None:
    """Print a line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", action="store_true", help="also two chunks a rank")
    arguments = parser.parse_args()
    print(f"{'F,I,W':>7} {'ends':>4} {'v':>1} {'cap':>4} {'bound':>7} {'greedy':>7} {'gap':>6} {'found':>7} {'gap':>6} "
          f"{'s':>5}  found by")  # fmt: skip
    for ends in (1.0, 1.3):
        for costs in ((1, 1, 1), (2, 3, 2)):
            for cap in (16, 8, BY_RANK, 5, 3):
                line(1, costs, ends, cap)
    for ends in (1.0, 1.3) if arguments.chunks else ():
        for costs in ((1, 1, 1), (2, 3, 2)):
            for cap in (32, 16, 12, 10, 8, 6):
                line(2, costs, ends, cap)


def line(v: int, costs: tuple[int, int, int], ends: float, cap: int | list[int]) -> None:
    """Search one case: ``ends`` is the factor of the first and the last stage."""
    factors = [10 * ends, *[10.0] * (P * v - 2), 10 * ends]
    whole = Costs(*[[round(cost * factor) for factor in factors] for cost in costs])
    begun = time.process_time()
    result = search(p=P, m=M, v=v, costs=whole, cap=cap)
    seconds = time.process_time() - begun
    caps = [cap] * P if isinstance(cap, int) else cap
    greedy = min(
        list_schedule(
            make_problem(P, v, M, placement, split=True, costs=whole, hops=Hops(), caps=caps), Rule("greedy")
        )[0]
        for placement in {loop_placement(P, v), zigzag_placement(P, v)}
    )
    found, bound = result.simulation.makespan, result.lower_bound
    print(
        f"{','.join(map(str, costs)):>7} {ends:>4} {v} {cap if isinstance(cap, int) else 'p-r':>4} {bound / 10:>7.1f} "
        f"{greedy / 10:>7.1f} {greedy / bound - 1:>6.1%} {found / 10:>7.1f} {result.gap:>6.1%} {seconds:>5.1f}  "
        f"{result.found_by}",
        flush=True,
    )


if __name__ == "__main__":
    main()
