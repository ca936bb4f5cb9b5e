"""What is wrong in a file that is no TOML: the line, what stands there, and what to change, in words of our own."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from mpipipe.errors import ConfigError

_PLACE = re.compile(r"(?P<what>.*) \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)", re.DOTALL)
_LINE_SHOWN = 60
_LINES_TRIED = 200

# Below: how what the standard library's parser says of a fault begins, and what that is in a run file.
_TWICE = "this key or section is there twice: keep one"
_COMPLETE = "this belongs to a section or key that is complete already: give it there"
_NESTED = "brackets are nested too deeply: no value of a run file needs more than one pair"
_BACKSLASH = "a backslash in text: write it twice, or put the text in single quotes"
_WORDS: tuple[tuple[str, str], ...] = (
    ("Cannot declare", "this section is there twice, or a key has its name: keep one"),
    ("Cannot overwrite", _TWICE),
    ("Cannot mutate", _COMPLETE),
    ("Cannot redefine", _COMPLETE),
    ("Duplicate inline table key", "this key is there twice: keep one"),
    ("Expected newline", "the value is none, or something stands behind it: write key = value, or [section]"),
    ("Invalid statement", "this is no line of a run file: write [section], key = value, or # and a comment"),
    ("Expected ']", "the section's name is not closed: write [section]"),
    ("Expected '=' after a key", "there is no = behind the key: write key = value"),
    ("Invalid initial character for a key part", "a key or section has no name: write [section], or key = value"),
    ("Unclosed array", "a list is not closed or has no comma between two values: write [value, value]"),
    ("TOML inline arrays/tables", _NESTED),
    ("Unclosed inline table", "a table in braces is not closed: write a line [section], and its keys below"),
    ("Unescaped", _BACKSLASH),
    ("Invalid hex value", _BACKSLASH),
    ("Escaped character is not", _BACKSLASH),
    ("Unterminated string", "text without its closing quote"),
    ("Expected", "text without its closing quote"),
    ("Illegal character", "a character that may not stand here, in text often the end of the line: close the quotes"),
    ("Found invalid character", "a control character: delete it"),
    ("Invalid date or datetime", "a date that the calendar does not have"),
    ("Invalid value", "no value: write a number, true, false, a list in brackets, or text in quotes"),
)


def explain_syntax(failure: ValueError | RecursionError, text: str, file: str | Path) -> ConfigError:
    """The ConfigError for ``text`` that the TOML parser refused; it names the line and shows it."""
    lines = text.replace("\r\n", "\n").split("\n")
    if isinstance(failure, RecursionError):
        number = 1 + max(range(len(lines)), key=lambda n: lines[n].count("[") + lines[n].count("{"))
        return ConfigError(f"line {number}{_quoted(lines[number - 1])}: {_NESTED}", file=file)
    place = _PLACE.fullmatch(str(failure))
    if place is None:
        return _without_place(lines, file)
    what = next((ours for theirs, ours in _WORDS if place["what"].startswith(theirs)), "this is no TOML")
    number = int(place["line"]) if place["line"] else _last_statement(lines)
    line = lines[number - 1]
    where = f"line {number}" + (f", column {place['column']}" if place["line"] and len(line) > _LINE_SHOWN else "")
    return ConfigError(f"{where}{_quoted(line)}: {what}", file=file)


def explain_encoding(failure: UnicodeDecodeError, file: str | Path) -> ConfigError:
    """The ConfigError for bytes that are no UTF-8; it names the line."""
    content = failure.object
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return ConfigError("line 1 begins as UTF-16, and a run file is UTF-8 text: save it as UTF-8", file=file)
    number = content.count(b"\n", 0, failure.start) + 1
    return ConfigError(
        f"line {number} holds the byte 0x{content[failure.start]:02x}, which is no UTF-8 text: save the file as UTF-8",
        file=file,
    )


def _without_place(lines: list[str], file: str | Path) -> ConfigError:
    """For the parser's one fault without a place: a whole number of more digits than Python reads."""
    limit = sys.get_int_max_str_digits() or sys.int_info.default_max_str_digits
    too_long = re.compile(rf"[0-9_]{{{limit},}}")
    number = next((n for n, line in enumerate(lines, 1) if too_long.search(line)), None)
    if number is None:
        return ConfigError("a value that can't be read", file=file)
    return ConfigError(f"line {number}{_quoted(lines[number - 1])}: a number of too many digits", file=file)


def _last_statement(lines: list[str]) -> int:
    """Number of the line behind the longest beginning of the file that is TOML: what begins there does not end."""
    last = max((number for number, line in enumerate(lines, 1) if line.strip()), default=1)
    for number in range(last, max(0, last - _LINES_TRIED), -1):
        if not lines[number - 1].strip():
            continue
        try:
            tomllib.loads("\n".join(lines[: number - 1]))
        except (ValueError, RecursionError):
            continue
        return number
    return last


def _quoted(line: str) -> str:
    shown = "".join(letter if letter.isprintable() else "?" for letter in line.strip())
    if len(shown) > _LINE_SHOWN:
        shown = shown[: _LINE_SHOWN - 3] + "..."
    return f" ({shown})" if shown else ""
