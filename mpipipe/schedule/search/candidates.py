"""Every family of the library with its options, as candidates of a search. Letters: p = num_ranks, v = chunks_per_rank,
m = num_microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mpipipe.errors import ScheduleError
from mpipipe.schedule.registry import FAMILIES, build
from mpipipe.schedule.table import ScheduleTable

_MOST_OF_AN_OPTION = 12
_LARGEST_PER_HOP = 4


def candidates(
    p: int, v: int, m: int, *, families: Sequence[str] | None, overlap_gains: bool
) -> Iterator[tuple[str, ScheduleTable | None, str]]:
    """(name, table, "") of each candidate, (name, None, why not) of a family that does not take p, v, m or that a
    search does not use.

    ``families``: names, with or without options; None for all. A name with options is taken as it is, one without with
    every option's values up to where they change nothing. Overlapped pairs are taken apart, which loses nothing unless
    ``overlap_gains``. Raises ScheduleError for a name that is given and unknown.
    """
    for name in FAMILIES if families is None else families:
        for spec in [name] if ":" in name else _specs(name, p, m):
            if spec.partition(":")[0] not in FAMILIES:
                build(spec, p=p, v=v, m=m)
            try:
                table = build(spec, p=p, v=v, m=m)
            except ScheduleError as error:
                yield spec, None, str(error)
                break
            reason = _unfit(table, overlap_gains)
            if reason:
                yield spec, None, reason
                break
            yield spec, replace(table, overlaps=table.overlaps[:0]) if table.overlaps.size else table, ""


def _unfit(table: ScheduleTable, overlap_gains: bool) -> str:
    if table.mirror is not None:
        return "has two copies of every stage"
    if table.overlaps.size and overlap_gains:
        return "gains from overlapped pairs, which a search does not weigh: compare it with 'schedule compare'"
    return ""


def _specs(name: str, p: int, m: int) -> list[str]:
    """The family's name, without options and with each value that is worth a try."""
    family = FAMILIES.get(name)
    values: dict[str, list[int]] = {}
    for option in family.options if family is not None else ():
        if option == "warmup":
            values[option] = _spread(1, p - 1)
        elif option == "per_hop":
            values[option] = list(range(3, _LARGEST_PER_HOP + 1))
        elif option == "group":
            values[option] = [size for size in _spread(p, m) if size > 1]
    return [name, *(f"{name}:{option}={value}" for option, some in values.items() for value in some)]


def _spread(first: int, last: int) -> list[int]:
    """All whole numbers of a range, or a dozen of them."""
    step = max(1, -(-(last - first + 1) // _MOST_OF_AN_OPTION))
    return list(range(first, last + 1, step))
