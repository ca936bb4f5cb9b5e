"""Mutated run files: each is a Config or a ConfigError in our own words."""

from __future__ import annotations

import random
from pathlib import Path

from mpipipe.config import Config
from mpipipe.config.keys import section_fields
from mpipipe.errors import ConfigError

EXAMPLE = (Path(__file__).resolve().parents[3] / "jobs" / "configs" / "tiny.toml").read_text()
NUMBERS = [
    "0",
    "1",
    "-1",
    "2",
    "1.0",
    "0.5",
    "1e400",
    "-inf",
    "nan",
    "9" * 20,
    "9" * 400,
    "0x10",
    "1_000",
    "true",
    "false",
]
TEXTS = [
    "''",
    "'x'",
    "'1e-4'",
    "auto",
    "'3h'",
    r'"\u0000"',
    r'"\ud7ff"',
    "1979-05-27",
    "07:32:00",
    "1979-05-27T07:32:00Z",
]
LISTS = ["[]", "[1]", "[1,2,5]", "['a']", "[[]]", "{}", "{a=1}", "[true,0.5]", "[0.5,0.5]"]
VALUES = [*NUMBERS, *TEXTS, *LISTS]
WORDS_OF_OTHERS = ("pydantic", "Traceback", "Input should", "validation error", "literal_error", "object at 0x")


def check(text: str, path: Path) -> bool:
    """Whether the text is a good run file; fails for anything but a Config or a ConfigError."""
    path.write_text(text)
    try:
        config = Config.load(path)
    except ConfigError as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert not any(word in message for word in WORDS_OF_OTHERS), message
        assert all(line.startswith(str(path)) for line in message.splitlines()), message
        return False
    assert Config.from_toml(config.to_toml()) == config
    return True


def as_text(tables: dict[str, dict[str, str]]) -> str:
    return "".join(f"[{name}]\n" + "".join(f"{k} = {v}\n" for k, v in keys.items()) for name, keys in tables.items())


def test_every_key_with_odd_values(tmp_path):
    random_numbers = random.Random(2)
    good = 0
    base = {"model": {"layers": "4", "hidden": "8", "heads": "2", "sequence": "8"}}
    for section, keys in section_fields(Config).items():
        for key in keys:
            for value in random_numbers.sample(VALUES, 12):
                tables = {name: dict(entries) for name, entries in base.items()}
                tables.setdefault(section, {})[key] = value
                good += check(as_text(tables), tmp_path / "run.toml")
    assert good > 50


def test_characters_changed(tmp_path):
    random_numbers = random.Random(0)
    outcomes = set()
    letters = "[]{}=.\"'#\n\\ \t-+eE0123456789abcxyz_,é\x00"
    for _ in range(400):
        text = list(EXAMPLE)
        for _ in range(random_numbers.randint(1, 4)):
            place = random_numbers.randrange(len(text))
            action = random_numbers.randrange(3)
            text[place] = ("", random_numbers.choice(letters), text[place] + random_numbers.choice(letters))[action]
        outcomes.add(check("".join(text), tmp_path / "run.toml"))
    assert outcomes == {True, False}


def test_lines_moved_lost_and_doubled(tmp_path):
    random_numbers = random.Random(1)
    outcomes = set()
    for _ in range(300):
        lines = EXAMPLE.splitlines()
        action = random_numbers.randrange(3)
        place, other = random_numbers.randrange(len(lines)), random_numbers.randrange(len(lines))
        line = lines[place]
        if action < 2:
            del lines[place]
        if action > 0:
            lines.insert(other, line)
        outcomes.add(check("\n".join(lines), tmp_path / "run.toml"))
    assert outcomes == {True, False}
