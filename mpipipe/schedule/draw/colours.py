"""The colours of all pictures.

The kinds differ in lightness as well as in hue, light to dark: F, W, I, B. So they can be told apart in a grey print
and with each of the common forms of colour blindness; the tests measure both. Higher chunks are darker, within
the band of their kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from mpipipe.schedule.action import Kind
from mpipipe.schedule.phases import Phase


class KindStyle(NamedTuple):
    """``light`` is the colour of chunk 0 where there are several, ``dark`` that of the last; ``ink``: text on both."""

    name: str
    light: str
    dark: str
    ink: str


STYLES: Mapping[Kind, KindStyle] = MappingProxyType(
    {
        Kind.F: KindStyle("forward", "#b6e0f8", "#76c2f0", "#000000"),
        Kind.B: KindStyle("backward", "#6a2852", "#3f0b30", "#ffffff"),
        Kind.I: KindStyle("input gradient", "#b94d17", "#973606", "#ffffff"),
        Kind.W: KindStyle("weight gradient", "#2aa67f", "#1d936c", "#000000"),
    }
)
"""By kind, in the order of legends."""

PHASE_COLOURS: Mapping[Phase, str] = MappingProxyType(
    {Phase.WARMUP: "#d2d2d2", Phase.STEADY: "#8d8d8d", Phase.COOLDOWN: "#3f3f3f"}
)
_ONLY_CHUNK = 0.5
IDLE = "#f1f1f1"
TEXT, FAINT = "#1a1a1a", "#6b6b6b"
MEMORY_FILL, MEMORY_LINE = "#dcd6ea", "#6a5b94"
PATH, HALO = "#000000", "#ffffff"
STRIPE = "#ffffff"
"""The mark of a stage's second copy, along the lower edge of its actions."""


def shade(kind: Kind, chunk: int, v: int) -> tuple[float, float, float]:
    """Colour (red, green, blue, each 0..1) of an action: that of its kind, lightest for chunk 0 of v; in
    between where v is 1."""
    style = STYLES[kind]
    dark = _ONLY_CHUNK if v == 1 else chunk / (v - 1)
    parts = [
        (1 - dark) * int(style.light[at : at + 2], 16) + dark * int(style.dark[at : at + 2], 16) for at in (1, 3, 5)
    ]
    red, green, blue = (part / 255 for part in parts)
    return red, green, blue


def fill(kind: Kind, chunk: int, v: int) -> str:
    """``shade`` as ``#rrggbb``."""
    return "#" + "".join(f"{round(part * 255):02x}" for part in shade(kind, chunk, v))
