"""How a rank waits: without starving the ranks that share its cores, and never for ever."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

POLICIES = ("auto", "spin", "yield", "nap")

ALARM_EVERY_S = 0.1
"""A rank that waits looks so often whether another one has given up."""

_TESTS_PER_LOOK = 64
_TESTS_PER_YIELD = 4
_YIELD_S = 100e-6
_NAP_S = 50e-6
_LONGEST_NAP_S = 500e-6
_NAP_SHARE = 1 / 128
_TESTS_PER_WAKE = 64

_MOVES_DATA_NS = 2_000
_TIMES_IDLE = 4


_PR_SET_TIMERSLACK = 29


def _never() -> bool:
    return False


def _end_naps_in_time() -> None:
    """Linux ends a thread's sleep up to 50 us late, to wake several at once (timer slack, prctl(2)): as long again as
    the shortest nap. From here on this thread's end when they are to.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


class Pace:
    """Tells by its time whether a call of MPI moved data.

    One that finds nothing to do takes 100 to 500 ns, but for the first after a pause; where Open MPI sees more ranks
    than cores it gives the core away in each call, which takes 5 to 20 us. So what counts is 2 us, and four times the
    least of the last calls.
    """

    __slots__ = ("_idle_ns",)

    def __init__(self) -> None:
        self._idle_ns = _MOVES_DATA_NS // _TIMES_IDLE

    @property
    def is_quick(self) -> bool:
        """Whether an idle call costs next to nothing."""
        return self._idle_ns < _MOVES_DATA_NS

    def moved_data(self, ns: int) -> bool:
        """``ns``: how long the call took."""
        idle = self._idle_ns
        self._idle_ns = ns if ns < idle else idle + (idle >> 5) + 1
        return ns > _MOVES_DATA_NS and ns > _TIMES_IDLE * idle


class _Limits:
    """When a wait looks up: whether its time is over, and every ALARM_EVERY_S whether another rank has given up."""

    __slots__ = ("_alarm", "_look", "_start", "_timeout_s", "waited")

    def __init__(self, timeout_s: float, alarm: Callable[[], bool]) -> None:
        self._start = time.monotonic()
        self._timeout_s = timeout_s
        self._alarm = alarm
        self._look = ALARM_EVERY_S
        self.waited = 0.0

    def reached(self) -> bool:
        self.waited = waited = time.monotonic() - self._start
        if waited > self._look:
            self._look = waited + ALARM_EVERY_S
            if self._alarm():
                return True
        return waited > self._timeout_s


class Waiter:
    """Tests a condition until it holds.

    ``spin`` tests without pause: one core a rank, whoever else wants it. ``yield`` lets others run after every few
    tests, and goes on at once when there are none. ``nap`` yields for 100 us, then sleeps between tests: a nap lasts
    1/128 of the wait so far, from 50 us up to 500 us, so that it adds little to a wait of any length and a long one
    costs few per cent of a core. ``auto`` is ``yield`` where every rank of the node can have a core (``own_core``),
    else ``nap``.
    """

    def __init__(self, policy: str, own_core: bool, timeout_s: float) -> None:
        if policy not in POLICIES:
            raise ValueError(f"wait policy {policy!r}: one of {', '.join(POLICIES)}")
        self.policy = policy if policy != "auto" else "yield" if own_core else "nap"
        self.timeout_s = timeout_s
        self._until = {"spin": _spin, "yield": _yield, "nap": self._nap}[self.policy]
        self._pace = Pace()
        if self.policy == "nap":
            _end_naps_in_time()

    def wait(self, test: Callable[[], bool], alarm: Callable[[], bool] = _never) -> bool:
        """True once ``test()`` is true, False when the time limit or an ``alarm()``, asked for every ALARM_EVERY_S,
        came first.
        """
        return self._until(test, _Limits(self.timeout_s, alarm))

    def _nap(self, test: Callable[[], bool], limits: _Limits) -> bool:
        if _yield(test, limits, _YIELD_S):
            return True
        while not limits.reached():
            time.sleep(min(max(limits.waited * _NAP_SHARE, _NAP_S), _LONGEST_NAP_S))
            if self._drain(test):
                return True
        return False

    def _drain(self, test: Callable[[], bool]) -> bool:
        """Test until it is true or moves nothing more. Over TCP each call of MPI moves one piece of some 30 KB: with a
        nap between two of them 32 MiB took 137 ms in place of 21 ms.
        """
        clock, pace = time.perf_counter_ns, self._pace
        for k in range(_TESTS_PER_WAKE):
            start = clock()
            if test():
                return True
            if not pace.moved_data(clock() - start) and (k or not pace.is_quick):
                return False
        return False


def _spin(test: Callable[[], bool], limits: _Limits) -> bool:
    while True:
        for _ in range(_TESTS_PER_LOOK):
            if test():
                return True
        if limits.reached():
            return False


def _yield(test: Callable[[], bool], limits: _Limits, until_s: float = float("inf")) -> bool:
    give_way = os.sched_yield
    while True:
        for _ in range(_TESTS_PER_YIELD):
            if test():
                return True
        if limits.reached() or limits.waited > until_s:
            return False
        give_way()
