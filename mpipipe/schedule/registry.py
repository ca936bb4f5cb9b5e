"""The families of schedules by name. Letters: p = num_ranks, v = chunks_per_rank, m = num_microbatches."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from mpipipe.errors import ScheduleError
from mpipipe.schedule.families import (
    chimera,
    dualpipe,
    eager,
    gpipe,
    hanayo,
    interleaved,
    looped_bfs,
    naive,
    one_f_one_b,
    v_shape,
    zb_v,
    zero_bubble,
)
from mpipipe.schedule.family import Family
from mpipipe.schedule.table import MAX_STAGES, ScheduleTable

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.name: family
        for family in (
            naive.FAMILY,
            gpipe.FAMILY,
            one_f_one_b.FAMILY,
            eager.FAMILY,
            interleaved.FAMILY,
            looped_bfs.FAMILY,
            zero_bubble.ZB_H1,
            zero_bubble.ZB_H2,
            zero_bubble.INTERLEAVED_ZB,
            zb_v.FAMILY,
            v_shape.V_HALF,
            v_shape.V_MIN,
            dualpipe.DUALPIPE_V,
            dualpipe.DUALPIPE,
            chimera.FAMILY,
            hanayo.FAMILY,
        )
    }
)
"""The families by name, in the order in which they are listed."""


def names() -> tuple[str, ...]:
    """The names that ``build`` knows."""
    return tuple(FAMILIES)


def family_of(spec: str) -> tuple[Family, dict[str, int]]:
    """The family and the options of ``NAME`` or ``NAME:option=K,option=K``.

    Raises ScheduleError, in configuration keys, for an unknown name or option and for a value that does not fit.
    """
    name, colon, rest = str(spec).partition(":")
    if name not in FAMILIES:
        if name == "auto":
            raise ScheduleError(
                "pipeline.schedule = 'auto' lets a run and 'mpipipe plan' choose the table by the costs of the model's "
                "layers; there is no model here: name a schedule, or take 'mpipipe schedule search', which searches "
                f"for costs that you give (names: {', '.join(FAMILIES)})"
            )
        near = difflib.get_close_matches(name.lower(), FAMILIES, n=1, cutoff=0.65)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ScheduleError(f"pipeline.schedule = '{name}' is unknown{hint} (allowed: {', '.join(FAMILIES)})")
    family = FAMILIES[name]
    options: dict[str, int] = {}
    for part in rest.split(",") if colon else ():
        key, _, value = (text.strip() for text in part.partition("="))
        if key not in family.options or key in options:
            have = " ".join(f"{name}:{option}=K" for option in family.options) or "none"
            why = "stands twice" if key in options else "is no option of this schedule"
            raise ScheduleError(f"pipeline.schedule = '{spec}': '{part}' {why} (its options: {have})")
        least = family.options[key].least
        if not re.fullmatch(r"[0-9]{1,9}", value, re.ASCII) or int(value) < least:
            raise ScheduleError(f"pipeline.schedule = '{spec}': {key} must be a whole number, {least} or more")
        options[key] = int(value)
    return family, options


def build(name: str, *, p: int, m: int, v: int | None = None) -> ScheduleTable:
    """The table of a family for p ranks, v chunks per rank and m microbatches, each 1 or more (m < p too).

    ``name``: a family, with options as in ``1f1b:warmup=2``. Without ``v`` the family's own number is taken: 1, or 2
    where the family is defined on two chunks. The table's name is ``name``. Raises ScheduleError, in configuration
    keys, for an unknown name, a number that does not fit, and what the family does not take; it names the nearest
    values that the family takes.
    """
    family, options = family_of(name)
    v = family.default_chunks if v is None else v
    numbers = (("pipeline.ranks", p), ("pipeline.chunks", v), ("m, from batch.sequences and batch.microbatch,", m))
    for key, number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ScheduleError(f"{key} = {number!r} must be a whole number, 1 or more")
    if p * v > MAX_STAGES:
        raise ScheduleError(
            f"pipeline.ranks = {p} times pipeline.chunks = {v} gives {p * v} stages, a table holds at most {MAX_STAGES}"
        )
    refusal = family.refusal(p, v, m)
    if refusal is not None:
        raise ScheduleError(refusal)
    table = family.generate(p, v, m, **options)
    return table if table.name == name else replace(table, name=name)
