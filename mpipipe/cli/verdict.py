"""A line of ``mpipipe doctor``'s report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "missing", "warning", "wrong"]


@dataclass(frozen=True)
class Verdict:
    """One line of the report. ``wrong``: nothing that needs it works; ``missing``: not installed, and not needed for
    all verbs."""

    subject: str
    level: Level
    text: str
