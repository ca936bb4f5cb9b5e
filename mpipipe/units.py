"""Durations and sizes as text: durations as a user writes them, both as a user reads them."""

from __future__ import annotations

import math
import re

from mpipipe.errors import ConfigError

_DURATION_UNITS_S = {"d": 86400.0, "h": 3600.0, "m": 60.0, "min": 60.0, "s": 1.0, "ms": 1e-3}
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(d|h|min|ms|m|s)", re.ASCII)
_DURATION_ALLOWED = 'numbers with the units d, h, m, s or ms, as "3h50m" or "90s"'


def parse_duration(text: str) -> float:
    """Seconds in a duration such as ``"3h50m"``, ``"1d 12h"``, ``"90s"`` or ``"1.5h"``.

    Raises ConfigError for anything else: a number without a unit, an unknown unit, a unit named twice, no time at all.
    """
    rest = text.strip()
    seconds = 0.0
    seen: set[str] = set()
    position = 0
    while position < len(rest):
        part = _DURATION_PART.match(rest, position)
        if part is None or part[2] in seen:
            raise ConfigError(f"{text!r} is not a duration", value=text, allowed=_DURATION_ALLOWED)
        seen.add(part[2])
        seconds += float(part[1]) * _DURATION_UNITS_S[part[2]]
        position = part.end()
        while position < len(rest) and rest[position] == " ":
            position += 1
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{text!r} is not a duration above zero", value=text, allowed=_DURATION_ALLOWED)
    return seconds


def format_seconds(seconds: float) -> str:
    """A duration for reading: ``0.41 us``, ``12.3 ms``, ``4.56 s``, ``3m20s``, ``3h50m``, ``2d04h``."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (60.0, 1.0, "s")):
        if seconds < 0.9995 * limit:
            return f"{_three_digits(seconds * factor)} {unit}"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def counted(number: int, noun: str, plural: str = "s") -> str:
    """A number with its noun, for reading: ``1 rank``, ``2 ranks``; ``plural`` is what is put behind the noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"


def format_bytes(nbytes: float) -> str:
    """A size for reading in powers of 1024: ``512 B``, ``1.50 KiB``, ``80.0 GiB``."""
    if nbytes < 0:
        return "-" + format_bytes(-nbytes)
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    units = ("KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log2(nbytes) // 10), len(units))
    return f"{_three_digits(nbytes / 1024**power)} {units[power - 1]}"


def _three_digits(number: float) -> str:
    if number >= 100:
        return f"{number:.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def finite_or_none(value: object) -> object:
    """JSON has no word for nan and infinity: None in their place."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
