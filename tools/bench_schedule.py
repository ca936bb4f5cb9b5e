"""How fast schedule tables are built, checked and simulated, and whether the cost stays linear in the actions.

    python tools/bench_schedule.py              tables of 65 thousand to 1 million actions
    python tools/bench_schedule.py --large      also 4.2 and 16.8 million (90 s, 1.2 GiB)
    python tools/bench_schedule.py --families   every schedule at p = 64, m = 256

One line a table: actions, millions of actions a second of each part, and the peak memory of the process so far. One
core; a part's time is the best of three where it takes less than two seconds.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable

from mpipipe.errors import ScheduleError
from mpipipe.schedule import ScheduleTable, build, find_problems, names, simulate

CURVE = ((64, 512), (128, 1024), (256, 2048))
LARGE = ((512, 4096), (1024, 8192))


def best(run: Callable[[], object]) -> float:
    """Seconds, the best of up to three."""
    times = []
    while len(times) < 3 and (not times or sum(times) < 2.0):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def line(name: str, p: int, m: int) -> str | None:
    """The figures of one table; None if the schedule does not take the numbers."""

    def made() -> ScheduleTable:
        return build(name, p=p, m=m)

    try:
        table = made()
    except ScheduleError:
        return None
    count = table.num_actions
    built, checked = best(made), best(lambda: find_problems(table))
    simulated = best(lambda: simulate(table))
    rates = "  ".join(f"{count / seconds / 1e6:8.2f}" for seconds in (built, checked, simulated))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return f"{name:<15} {p:>5} {m:>6} {count:>11,}  {rates}  {simulated:8.3f} s  {memory:5.2f} GiB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="also tables of 4.2 and 16.8 million actions")
    parser.add_argument("--families", action="store_true", help="every schedule at p = 64, m = 256")
    asked = parser.parse_args()
    print(f"{'schedule':<15} {'p':>5} {'m':>6} {'actions':>11}  {'build':>8}  {'check':>8}  {'simulate':>8}  million/s")
    if asked.families:
        wanted = [(name, 64, 256) for name in names()]
    else:
        wanted = [("1f1b", p, m) for p, m in (*CURVE, *(LARGE if asked.large else ()))]
    for name, p, m in wanted:
        found = line(name, p, m)
        if found is not None:
            print(found, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
