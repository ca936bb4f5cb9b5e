"""Search: the best table for given costs under a cap on activations, and a makespan that none can beat.

Reading order: ``problem`` (the actions as numbers), ``graph`` and ``least`` (the lower bound), ``candidates`` (the
families), ``list_schedule`` and ``rules``, ``repeat`` (repeated blocks), ``local`` (local search), ``search`` (all of
it, one after another).
"""

from __future__ import annotations

from mpipipe.schedule.search.search import SearchResult, Tried, search

__all__ = ["SearchResult", "Tried", "search"]
