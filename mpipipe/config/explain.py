"""From validation errors to one ConfigError in the words and keys of the user's own run file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from mpipipe.config.keys import expected, nearest_key, nearest_section, options, section_fields
from mpipipe.config.later import LATER_KEYS, LATER_VALUES
from mpipipe.config.sections import WRONG
from mpipipe.errors import ConfigError

FileOf = Callable[[str], str | None]  # dotted key -> the file (or "--set") that gave it


def shown(value: object, depth: int = 0) -> str:
    """A value as a run file would have it, cut to 60 characters, for a message."""
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, str):
        text = '"' + value.encode("utf-8", "backslashreplace").decode("utf-8") + '"'
    elif isinstance(value, list | tuple):
        entries = [shown(entry, depth + 1) for entry in value[:9]] if depth < 3 else ["..."] * bool(value)
        text = "[" + ", ".join(entries) + (", ...]" if len(value) > 9 else "]")
    elif isinstance(value, Mapping):
        text = "a table"
    elif isinstance(value, int) and abs(value) >= 10**50:
        text = "a number of more than 50 digits"
    else:
        text = str(value)
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= 60 else text[:57] + "..."


def joined(errors: Sequence[ConfigError]) -> ConfigError:
    """One error that is the first of ``errors`` and whose message has a line for each, without repeats."""
    first = errors[0]
    first.args = ("\n".join(dict.fromkeys(str(error) for error in errors)),)
    return first


def explain(
    failure: ValidationError, root: type[BaseModel], values: Mapping[str, object], file_of: FileOf
) -> ConfigError:
    """The ConfigError for ``values`` (section, key, value) that are no valid ``root``; unknown keys come first."""
    details = failure.errors(include_url=False)
    fields = section_fields(root)
    present = {f"{s}.{key}" for s, keys in values.items() if isinstance(keys, Mapping) for key in keys}
    unknown = [d for d in details if d["type"] == "extra_forbidden"]
    errors = [_unknown(tuple(d["loc"]), d["input"], fields, present, file_of) for d in unknown]
    meant = {error.nearest for error in errors}
    errors += [
        _wrong(d, fields, file_of)
        for d in details
        if d["type"] != "extra_forbidden" and not (d["type"] == "missing" and _dotted(d["loc"]) in meant)
    ]
    return joined(errors)


def _dotted(location: Iterable[int | str]) -> str:
    return ".".join(str(part) for part in tuple(location)[:2])


def _unknown(
    location: tuple[int | str, ...],
    value: object,
    fields: dict[str, dict[str, FieldInfo]],
    present: set[str],
    file_of: FileOf,
) -> ConfigError:
    key = _dotted(location)
    file = file_of(key)
    if len(location) == 1:
        return _unknown_at_top(key, value, fields, present, file)
    section, name = str(location[0]), str(location[1])
    if key in LATER_KEYS:
        return ConfigError(
            f"this version does not have this key yet ({LATER_KEYS[key]}); remove it",
            file=file,
            key=key,
            value=value,
        )
    nearest = nearest_key(section, name, fields, present)
    problem = f"unknown key (value {shown(value)})"
    allowed = None
    if nearest is None:
        allowed = list(fields[section])
    elif not nearest.startswith(f"{section}."):
        other, leaf = nearest.split(".")
        problem += f": [{section}] has no such key, '{leaf}' belongs to [{other}]"
    return ConfigError(problem, file=file, key=key, value=value, allowed=allowed, nearest=nearest)


def _unknown_at_top(
    name: str, value: object, fields: dict[str, dict[str, FieldInfo]], present: set[str], file: str | None
) -> ConfigError:
    if isinstance(value, Mapping):
        nearest = nearest_section(name, fields)
        return ConfigError(
            f"unknown section [{shown(name)[1:-1]}]",
            file=file,
            key=name,
            value=value,
            allowed=None if nearest else list(fields),
            nearest=nearest,
        )
    nearest = nearest_key("", name, fields, present)
    problem = f"unknown key (value {shown(value)}): every key belongs to a section"
    allowed = None if nearest else list(fields)
    return ConfigError(problem, file=file, key=name, value=value, allowed=allowed, nearest=nearest)


def _wrong(detail: ErrorDetails, fields: dict[str, dict[str, FieldInfo]], file_of: FileOf) -> ConfigError:
    location = tuple(detail["loc"])
    key, value = _dotted(location), detail["input"]
    file = file_of(key)
    section = str(location[0]) if location else ""
    if len(location) < 2:
        problem = f"is {shown(value)}; it must be a table: write a line [{section}], and its keys below"
        return ConfigError(problem, file=file, key=key, value=value, allowed="a table")
    field = fields[section][str(location[1])]
    if detail["type"] == "missing":
        problem = f"this key is required: {field.description}"
        return ConfigError(problem, file=file, key=key, allowed=expected(field))
    if detail["type"] == WRONG:
        context = detail["ctx"]
        return ConfigError(
            f"{shown(value)} {context['problem']}", file=file, key=key, value=value, allowed=context["allowed"]
        )
    if value in LATER_VALUES.get(key, ()) and isinstance(value, str):
        problem = f"this version does not have {shown(value)} yet"
    else:
        problem = f"{shown(value)} {_what_is_wrong(detail, field)}"
    return ConfigError(problem, file=file, key=key, value=value, allowed=expected(field))


def _what_is_wrong(detail: ErrorDetails, field: FieldInfo) -> str:
    value, kind = detail["input"], detail["type"]
    number_wanted = kind in ("int_type", "float_type", "int_from_float", "bool_type")
    if number_wanted and isinstance(value, str):
        return "is text" + ("; drop the quotes" if _reads_as_number(value) else "")
    if number_wanted and isinstance(value, bool):
        return "is no number"
    if kind == "float_type" and isinstance(value, int):
        return "is too large"
    if kind in ("int_type", "int_from_float") and isinstance(value, float):
        return "is no whole number"
    if kind in ("greater_than", "greater_than_equal"):
        return "is too small"
    if kind in ("less_than", "less_than_equal"):
        return "is too large" if kind == "less_than" else f"is too large (at most {detail['ctx']['le']})"
    if kind == "finite_number":
        return "is no finite number"
    if options(field):
        return "is not known"
    return "has the wrong type"


def _reads_as_number(text: str) -> bool:
    if text in ("true", "false"):
        return True
    try:
        float(text)
    except ValueError:
        return False
    return True
