"""TOML in and out: the run file, ``--set section.key=value``, and a small writer for what Config holds."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

from mpipipe.errors import ConfigError

OVERRIDE = "--set"


def read(path: Path) -> dict[str, object]:
    """The tables of a TOML file. Raises ConfigError if there is no such file, or it can't be read or is no TOML."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError("no such file", file=path) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"is no UTF-8 text (byte {error.start})", file=path) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"can't be read: {reason}", file=path) from None
    return parse(text, path)


def parse(text: str, file: str | Path) -> dict[str, object]:
    """The tables of TOML text; ``file`` is its name in errors. Raises ConfigError if it is no TOML."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"is no valid TOML: {reason}", file=file) from None


def parse_override(text: str) -> tuple[str, str, object]:
    """Section, key and value of ``section.key=value``. The value is TOML; what is no TOML is taken as text.

    Raises ConfigError without a ``=`` or without a section.
    """
    dotted, equals, value = text.partition("=")
    section, dot, key = dotted.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"{text!r} is no setting", file=OVERRIDE, value=text, allowed="section.key=value")
    return section, key, _parse_value(value.strip())


def _parse_value(text: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}\n")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if list(parsed) == ["value"] else text


def write(tables: Mapping[str, Mapping[str, object]]) -> str:
    """TOML text of tables whose values are text, numbers, booleans or tuples of those; None is left out."""
    blocks = []
    for name, keys in tables.items():
        lines = [f"{key} = {_value(value)}" for key, value in keys.items() if value is not None]
        blocks.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(blocks) + "\n"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_value(entry) for entry in value) + "]"
    raise TypeError(f"no TOML for {type(value).__name__}")
