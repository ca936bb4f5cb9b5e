"""How a rank waits: without starving the ranks that share its cores, and never for ever."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from mpipipe.environment import has_core_of_its_own

_NAP_S = 50e-6
_YIELD_S = 100e-6
_SPINS_PER_LOOK = 64

ALARM_EVERY_S = 0.1
"""A rank that waits looks so often whether another one has given up."""


def _never() -> bool:
    return False


class Waiter:
    """Tests a condition until it holds.

    ``spin`` tests without pause: lowest latency, one core a rank. ``yield`` gives the core away between tests and naps
    50 us at a time after the first 100 us. ``auto`` spins where every rank of the node has a core of its own, and
    yields elsewhere.
    """

    def __init__(self, policy: str, local_size: int, timeout_s: float) -> None:
        if policy not in ("auto", "spin", "yield"):
            raise ValueError(f"wait policy {policy!r}: one of auto, spin, yield")
        self.spins = policy == "spin" or (policy == "auto" and has_core_of_its_own(local_size))
        self.timeout_s = timeout_s

    def wait(self, test: Callable[[], bool], alarm: Callable[[], bool] = _never) -> bool:
        """True once ``test()`` is true, False when the time limit or an ``alarm()``, asked for every ALARM_EVERY_S,
        came first.
        """
        if test():
            return True
        start = time.monotonic()
        return self._spin(test, alarm, start) if self.spins else self._yield(test, alarm, start)

    def _spin(self, test: Callable[[], bool], alarm: Callable[[], bool], start: float) -> bool:
        look = ALARM_EVERY_S
        while True:
            for _ in range(_SPINS_PER_LOOK):
                if test():
                    return True
            waited = time.monotonic() - start
            if waited > look:
                look = waited + ALARM_EVERY_S
                if alarm():
                    return False
            if waited > self.timeout_s:
                return False

    def _yield(self, test: Callable[[], bool], alarm: Callable[[], bool], start: float) -> bool:
        look = ALARM_EVERY_S
        while True:
            if test():
                return True
            waited = time.monotonic() - start
            if waited > look:
                look = waited + ALARM_EVERY_S
                if alarm():
                    return False
            if waited > self.timeout_s:
                return False
            if waited < _YIELD_S:
                os.sched_yield()
            else:
                time.sleep(_NAP_S)
