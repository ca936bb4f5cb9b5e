"""What verbs print: one JSON object, or a plain table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from mpipipe.units import finite_or_none


def print_json(value: Mapping[str, object]) -> None:
    """One JSON object on standard output; a number that JSON lacks (nan, infinity) becomes null."""
    print(json.dumps(_clean(value)), flush=True)


def _clean(value: object) -> object:
    if isinstance(value, float):
        return finite_or_none(value)
    if isinstance(value, Mapping):
        return {str(key): _clean(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(entry) for entry in value]
    return value


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns as wide as their widest cell; numbers to the right, in the first column only if all are numbers."""
    lines = [list(header), *([str(cell) for cell in row] for row in rows)]
    first = all(line[0].isdigit() for line in lines[1:])
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        cells = [
            cell.rjust(width) if cell[:1].isdigit() and (column or first) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
