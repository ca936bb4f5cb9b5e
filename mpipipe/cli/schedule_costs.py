"""The costs that the ``mpipipe schedule`` verbs simulate with, from the command line or from a file."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpipipe.errors import ConfigError

if TYPE_CHECKING:
    from mpipipe.schedule import Costs, ScheduleTable

_NUMBER = re.compile(r"[0-9]+\.?[0-9]*([eE][+-]?[0-9]+)?|\.[0-9]+([eE][+-]?[0-9]+)?")
_COSTS_BYTES = 16 * 1024 * 1024
_ALLOWED = "F, I and W, and FB for an overlapped pair, as F=1,I=1,W=0.5"

Cost = Annotated[
    str,
    typer.Option(
        "--cost", metavar="F=1,I=1,W=1", help="Durations of one chunk; B takes I + W, an overlapped pair FB or F + B."
    ),
]
CostsFile = Annotated[
    Path | None,
    typer.Option(
        "--costs",
        metavar="FILE",
        help='JSON, also with one number a stage: {"F": [...], "I": [...], "W": [...]}.',
        show_default=False,
    ),
]
Latency = Annotated[float, typer.Option("--latency", help="One way, for each hop between ranks, in the costs' unit.")]


def costs_from(text: str, path: Path | None) -> Costs:
    """Costs of ``--cost`` or of ``--costs``, F = I = W = 1 without either. Raises ConfigError, also for both."""
    if path is None:
        return parse_costs(text)
    if text:
        raise ConfigError("--cost and --costs exclude each other", key="--costs", value=str(path))
    return read_costs(path)


def check_costs(table: ScheduleTable, costs: Costs, latency: float) -> None:
    """Raise ScheduleError for costs and a latency that do not fit a table, also where nothing is simulated."""
    from mpipipe.schedule import Hops

    costs.per_stage(table.num_stages)
    Hops(latency).per_stage(table.num_stages)


def parse_costs(text: str) -> Costs:
    """Costs from ``F=1,I=1,W=1,FB=3``; what is not named costs 1, a pair F + B. Raises ConfigError."""
    from mpipipe.schedule import Costs

    costs: dict[str, float] = {"F": 1.0, "I": 1.0, "W": 1.0}
    given: set[str] = set()
    for part in text.split(",") if text else ():
        name, _, number = part.partition("=")
        name, number = name.strip(), number.strip()
        value = float(number) if _NUMBER.fullmatch(number) else math.nan
        if name not in (*costs, "FB") or name in given or not 0 <= value < math.inf:
            why = "stands twice" if name in given else "is no cost"
            raise ConfigError(f"{shortened(part)} {why}", key="--cost", value=text, allowed=_ALLOWED)
        given.add(name)
        costs[name] = value
    return Costs(**costs)


def read_costs(path: Path) -> Costs:
    """Costs from a JSON file: an object with F, I and W, each a number or a list with one number a stage, and perhaps
    FB, a number; or one that has such an object under "costs", as ``schedule show --json`` prints. Raises
    ConfigError."""
    from mpipipe.schedule import Costs

    def refuse(problem: str) -> ConfigError:
        return ConfigError(
            problem, file=path, key="--costs", value=str(path), allowed='{"F": [...], "I": [...], "W": [...]}'
        )

    try:
        if path.stat().st_size > _COSTS_BYTES:
            raise ValueError(f"it is larger than {_COSTS_BYTES:,} bytes")
        found = json.loads(path.read_bytes(), object_pairs_hook=_once)
    except OSError as error:
        raise refuse(f"can't be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise refuse(f"holds no costs as JSON: {error}") from None
    if isinstance(found, dict) and isinstance(found.get("costs"), dict):
        found = found["costs"]
    if not isinstance(found, dict) or set(found) - {"FB"} != {"F", "I", "W"}:
        raise refuse("must hold F, I and W, and nothing else but FB")
    for name, value in found.items():
        numbers = value if isinstance(value, list) and value and name != "FB" else [value]
        if not all(_is_cost(one) for one in numbers):
            raise refuse(f"{name} must be a number, 0 or more" + (", or a list, one a stage" if name != "FB" else ""))
    return Costs(**found)


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object whose keys stand in it once each."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {shortened(twice)} stands twice in one object")
    return found


def _is_cost(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value <= sys.float_info.max  # compares whole numbers of any length


def shortened(text: str) -> str:
    """What the user wrote, in quotes, without the middle of a long text."""
    return f"'{text}'" if len(text) <= 60 else f"'{text[:40]}...{text[-10:]}'"
