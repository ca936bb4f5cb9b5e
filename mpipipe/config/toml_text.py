"""TOML in and out: the run file, ``--set section.key=value``, and a small writer for what Config holds."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from mpipipe.config.syntax import explain_encoding, explain_syntax
from mpipipe.errors import ConfigError

OVERRIDE = "--set"
RUN_FILE_OF_A_RUN = "config.toml"
"""The run file that a run leaves in its folder."""
_BEGINS_AS_TOML = re.compile(r"""["'{]|\[\s*["'{\[]|\[[^\]]*$""")  # a glob as [ab]*.h5 does not


def read(path: Path) -> dict[str, object]:
    """The tables of a TOML file. Raises ConfigError if there is no such file, or it can't be read or is no TOML."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError("no such file", file=path) from None
    except IsADirectoryError:
        raise _is_a_folder(path) from None
    except UnicodeDecodeError as error:
        raise explain_encoding(error, path) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"can't be read: {reason}", file=path) from None
    return parse(text, path)


def _is_a_folder(path: Path) -> ConfigError:
    inside = path / RUN_FILE_OF_A_RUN
    if inside.is_file():
        return ConfigError(f"is a directory, a run folder; its run file is {inside}", file=path, allowed=str(inside))
    return ConfigError("is a directory, and a run file is needed", file=path)


def parse(text: str, file: str | Path) -> dict[str, object]:
    """The tables of TOML text; ``file`` is its name in errors. Raises ConfigError if it is no TOML."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise explain_syntax(error, text, file) from None


def parse_override(text: str) -> tuple[str, str, object]:
    """Section, key and value of ``section.key=value``. The value is TOML; what is no TOML is taken as text.

    Without a dot the section is empty. Raises ConfigError without a ``=`` or a key.
    """
    dotted, equals, value = text.partition("=")
    section, dot, key = dotted.strip().partition(".")
    if equals and section and not dot:
        return "", section, _parse_value(section, value.strip())
    if not (equals and dot and section and key):
        raise ConfigError(f"{text!r} is no setting", file=OVERRIDE, value=text, allowed="section.key=value")
    return section, key, _parse_value(f"{section}.{key}", value.strip())


def parse_overrides(texts: Iterable[str]) -> dict[tuple[str, str], object]:
    """Values by section and key. Raises ConfigError for a text that is no setting, or two values for one key."""
    found: dict[tuple[str, str], object] = {}
    before: dict[tuple[str, str], str] = {}
    for text in texts:
        section, key, value = parse_override(text)
        given = text.partition("=")[2].strip()
        if before.setdefault((section, key), given) != given:
            raise ConfigError(
                f"given twice, as {before[section, key]} and as {given}: keep one",
                file=OVERRIDE,
                key=f"{section}.{key}",
                value=value,
            )
        found[section, key] = value
    return found


def _parse_value(key: str, text: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}\n")
    except (ValueError, RecursionError):
        if _BEGINS_AS_TOML.match(text):
            raise ConfigError(
                "this begins as TOML and is none; close quotes and brackets, and keep the shell from taking them away: "
                "--set 'data.train=[\"a.h5\"]'",
                file=OVERRIDE,
                key=key,
                value=text,
            ) from None
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
