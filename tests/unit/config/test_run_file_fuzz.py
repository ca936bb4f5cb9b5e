"""Mutated run files: each is a Config that honours every key of the file, or a ConfigError in our own words.

The oracle reads the file with the standard library and knows the defaults from this page, not from the package.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpipipe.config import Config
from mpipipe.errors import ConfigError

EXAMPLE = (Path(__file__).resolve().parents[3] / "jobs" / "configs" / "tiny.toml").read_text()
FULL = """\
[run]
dir = "runs/full"
name = "full"
seed = 7
steps = 100
resume = "never"
time_limit = "3h50m"
[model]
layers = 6
hidden = 48
heads = 6
ffn_hidden = 100
vocab = 300
sequence = 32
dropout = 0.1
tie_embeddings = false
norm_eps = 1e-6
[data]
train = ["a.h5", 'b/*.h5']
validation = "v.h5"
format = "h5"
shuffle = false
[batch]
sequences = 12
microbatch = 2
[pipeline]
ranks = 3
chunks = 1
schedule = "gpipe"
partition = [2, 2, 2]
[optimizer]
lr = 1e-3
betas = [0.8, 0.99]
eps = 1e-9
weight_decay = 0.2
decay = "all"
clip_norm = 1.5
[lr]
schedule = "linear"
warmup_steps = 5
min_lr = 1e-5
[checkpoint]
every_steps = 10
every_minutes = 2.5
keep_last = 3
keep_every = 20
[eval]
every_steps = 4
batches = 3
[trace]
enabled = true
first_step = 2
last_step = 9
[comm]
device = "cpu"
path = "staged"
wait = "yield"
timeout_s = 33
[log]
every_steps = 3
"""
DEFAULTS: dict[str, dict[str, object]] = {
    "run": {"seed": 0, "steps": 1000, "resume": "auto", "time_limit": None},
    "model": {"family": "gpt2", "vocab": 256, "dropout": 0.0, "tie_embeddings": True, "norm_eps": 1e-5},
    "data": {"train": (), "validation": (), "format": "auto", "shuffle": True},
    "batch": {"sequences": 8, "microbatch": 1},
    "pipeline": {
        "ranks": None, "replicas": 1, "chunks": 1, "schedule": "1f1b", "partition": "cost", "recompute": "none",
    },
    "optimizer": {
        "name": "adamw", "lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "decay": "matrices",
        "clip_norm": 0.0, "shard": False,
    },
    "lr": {"schedule": "constant", "warmup_steps": 0, "min_lr": 0.0},
    "precision": {"compute": "float32", "gradients": "float32"},
    "checkpoint": {
        "every_steps": 0, "every_minutes": 0.0, "keep_last": 0, "keep_every": 0, "background": False,
        "on_disk_trouble": "end",
    },
    "eval": {"every_steps": 0, "batches": 0},
    "trace": {"enabled": True, "first_step": 0, "last_step": None},
    "comm": {"device": "auto", "path": "auto", "wait": "auto", "timeout_s": 600.0, "receive_ahead_bytes": 67108864},
    "log": {"every_steps": 10, "tensorboard": False},
}  # fmt: skip
REQUIRED = {"layers", "hidden", "heads", "sequence"}
DERIVED = {"run": {"name", "dir"}, "model": {"ffn_hidden", *REQUIRED}}
# Keys that a contradiction may blame although the mutation was in the other one.
BLAMED_FOR_OTHERS = {
    "model.heads", "batch.sequences", "batch.microbatch", "lr.warmup_steps", "lr.min_lr", "eval.every_steps",
    "trace.first_step", "trace.last_step", "checkpoint.keep_every", "pipeline.ranks", "pipeline.chunks",
    "pipeline.partition",
}  # fmt: skip
KEYS = [f"{name}.{key}" for name in DEFAULTS for key in [*DEFAULTS[name], *sorted(DERIVED.get(name, ()))]]
VALUES = [
    "0", "1", "-1", "2", "1.0", "0.5", "1e400", "-inf", "nan", "9" * 20, "9" * 400, "9" * 5000, "0x10",
    "0x" + "f" * 5000, "1_000", "true", "false", "2147483647", "2147483648", "9223372036854775808", "-0.0", "1e-320",
    "''", "'x'", "'1e-4'", "auto", "'3h'", r'"\u0000"', r'"\ud7ff"', r'"\U0001F600 \u00a0"', "'''a\nb'''", "1979-05-27",
    "07:32:00", "1979-05-27T07:32:00Z", "[]", "[1]", "[1,2,5]", "['a']", "[[]]", "{}", "{a=1}", "[true,0.5]",
    "[0.5,0.5]", "[" * 90 + "]" * 90, "[" * 5000, "'3 h'", "'3h50'", "'-1h'", "'90'", "'90s 5m'", "'1e3s'", "10MB",
    "'a/b'", "'..'", "'" + "n" * 300 + "'", "[{}]", "[1979-05-27]", "['']", "[1, 'a', 2.0]", "{a.b=1}",
    '"""x"""', "+1", "1.", ".5", "01", "True", "None", "null", "",
]  # fmt: skip
WORDS_OF_OTHERS = re.compile(
    r"pydantic|Traceback|Input should|validation error|literal_error|object at 0x|tomllib|namespace|statement|"
    r"key part|Expected|Unclosed|sys\.|Exceeds|int_|_type|array|datetime|hex value|Errno|codec|NoneType|dict\b|tuple"
)
LINE = re.compile(r"line \d+")


def parsed_alone(content: bytes) -> dict[str, object] | None:
    """What the standard library makes of the file, or None if it is no TOML."""
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None


def same(found: object, written: object) -> bool:
    """Whether a resolved value is the one that stands in the file."""
    if isinstance(found, tuple):
        entries = written if isinstance(written, list | tuple) else [written]
        return len(found) == len(entries) and all(same(f, w) for f, w in zip(found, entries, strict=True))
    if isinstance(found, bool) or isinstance(written, bool):
        return found is written
    if isinstance(found, float) and isinstance(written, int):
        return found == float(written)
    return type(found) is type(written) and found == written


def expect_honoured(config: Config, parsed: dict[str, object], path: Path) -> None:
    """Every key of the file has the value that it has there, and every other key its default."""
    assert set(parsed) <= set(DEFAULTS)
    for section, defaults in DEFAULTS.items():
        written = parsed.get(section, {})
        if section == "model" and section not in parsed:
            assert config.model is None
            continue
        assert isinstance(written, dict)
        held = dict(getattr(config, section))
        assert set(held) == set(defaults) | DERIVED.get(section, set())
        expected = {**defaults, **written}
        if section == "run":
            expected = {"dir": f"runs/{expected.get('name', path.stem)}", "name": path.stem, **expected}
        if section == "model":
            assert set(written) >= REQUIRED
            expected = {"ffn_hidden": 4 * written["hidden"], **expected}
        for key, value in held.items():
            assert value is expected[key] is None or same(value, expected[key]), (section, key, value)


def expect_explained(error: ConfigError, content: bytes, parsed: dict[str, object] | None, path: Path) -> None:
    """The message names file and line, or file, key and value, in our own words."""
    message = str(error)
    assert error.seen_alike
    for line in message.splitlines():
        assert line.startswith(f"{path}: "), message
        rest = line.removeprefix(f"{path}: ")
        assert len(rest) < 400, message
        if parsed is None:
            assert LINE.match(rest), message
            assert not WORDS_OF_OTHERS.search(re.sub(r" \(.*\)", "", rest, count=1)), message
            number = int(rest.split()[1].rstrip(",:"))
            assert 1 <= number <= content.count(b"\n") + 1, message
            continue
        key = rest.split(": ")[0]
        expect_key(key, rest, parsed)


def expect_key(key: str, rest: str, parsed: dict[str, object]) -> None:
    section, _, leaf = key.partition(".") if key not in parsed else (key, "", "")
    required = section == "model" and leaf in REQUIRED and "this key is required" in rest
    table = parsed.get(section)
    there = (isinstance(table, dict) and leaf in table) or (not leaf and section in parsed)
    assert required or there or not key.isascii() or not key.replace(".", "").replace("_", "").isalnum(), (key, rest)
    if not (there and isinstance(table, dict) and leaf):
        return
    value = table[leaf]
    if isinstance(value, bool):
        assert str(value).lower() in rest, rest
    elif isinstance(value, int) and abs(value) < 10**30:
        assert str(value) in rest or str(float(value)) in rest, rest
    elif isinstance(value, str) and value.isprintable() and 0 < len(value) < 50 and "requires" not in rest:
        assert value in rest, rest
    if key in KEYS and key not in BLAMED_FOR_OTHERS and "unknown" not in rest:
        for base in (FULL, EXAMPLE):
            assert not same_as_in(base, section, leaf, value), f"blames a good value: {rest}"


def same_as_in(base: str, section: str, leaf: str, value: object) -> bool:
    table = tomllib.loads(base).get(section, {})
    return leaf in table and type(table[leaf]) is type(value) and table[leaf] == value


def check(content: bytes, path: Path) -> bool:
    """Whether the bytes are a good run file; fails for anything but a Config or a ConfigError as they should be."""
    path.write_bytes(content)
    parsed = parsed_alone(content)
    try:
        config = Config.load(path)
    except ConfigError as error:
        expect_explained(error, content, parsed, path)
        return False
    assert parsed is not None
    expect_honoured(config, parsed, path)
    assert Config.from_toml(config.to_toml()) == config
    return True


Dice = random.Random
LETTERS = "[]{}=.\"'#\n\\ \t-+eE0123456789abcxyz_,é\x00\ufeff\u200b\x7f\r"


def characters(dice: Dice, text: str) -> str:
    for _ in range(dice.randint(1, 3)):
        place = dice.randrange(len(text))
        letter, after = text[place], text[place + 1 : place + 2]
        middle = dice.choice(["", dice.choice(LETTERS), letter * 2, letter + dice.choice(LETTERS), after + letter])
        text = text[:place] + middle + text[place + (2 if middle == after + letter and after else 1) :]
    return text


def truncated(dice: Dice, text: str) -> str:
    place = dice.randrange(len(text))
    return dice.choice([text[:place], text[place:], text[:place] + text[place + dice.randrange(60) :]])


def lines(dice: Dice, text: str) -> str:
    rows = text.splitlines()
    place, other, action = dice.randrange(len(rows)), dice.randrange(len(rows)), dice.randrange(4)
    if action == 3:
        rows[place], rows[other] = rows[other], rows[place]
        return "\n".join(rows)
    row = rows[place]
    if action < 2:
        del rows[place]
    if action > 0:
        rows.insert(other, row)
    return "\n".join(rows)


def _pairs(text: str) -> list[re.Match[str]]:
    return list(re.finditer(r"^([a-z_]+)( = )(.*)$", text, re.MULTILINE))


def one_edit(dice: Dice, word: str) -> str:
    place = dice.randrange(len(word))
    letter = dice.choice("abcdefghijklmnopqrstuvwxyz_A1-")
    return dice.choice(
        [word[:place] + rest for rest in (word[place + 1 :], letter + word[place:], letter + word[place + 1 :])]
    )


def renamed_key(dice: Dice, text: str) -> str:
    pair = dice.choice(_pairs(text))
    return text[: pair.start(1)] + one_edit(dice, pair[1]) + text[pair.end(1) :]


def moved_key(dice: Dice, text: str) -> str:
    pair = dice.choice(_pairs(text))
    left = text[: pair.start()] + text[pair.end() + 1 :]
    header = dice.choice([m.end() for m in re.finditer(r"^\[[a-z]+\]$", left, re.MULTILINE)] + [0])
    return left[:header] + f"\n{pair[0]}\n" + left[header:]


def sections(dice: Dice, text: str) -> str:
    header = dice.choice(list(re.finditer(r"^\[([a-z]+)\]$", text, re.MULTILINE)))
    name, other = header[1], dice.choice(list(DEFAULTS))
    new = dice.choice(
        [one_edit(dice, name), other, f"{other}.{name}", f"{name}.{other}", f"[{name}]", f'"{name}"', f" {name} ",
         "", name.upper(), f"{name}]\n[{name}", f"{name}.", f"'{name} '"]
    )  # fmt: skip
    return text[: header.start()] + f"[{new}]" + text[header.end() :]


def swapped_values(dice: Dice, text: str) -> str:
    first, second = sorted(dice.sample(_pairs(text), 2), key=lambda pair: pair.start())
    between = text[first.end(3) : second.start(3)]
    return text[: first.start(3)] + second[3] + between + first[3] + text[second.end(3) :]


def other_value(dice: Dice, text: str) -> str:
    pair = dice.choice(_pairs(text))
    return text[: pair.start(3)] + dice.choice(VALUES) + text[pair.end(3) :]


def added_key(dice: Dice, text: str) -> str:
    section, key = dice.choice(KEYS).split(".")
    value, name = dice.choice(VALUES), dice.choice([key, f"{key}.x", f'"{key}"', f"{section}.{key}"])
    if f"[{section}]\n" in text and dice.random() < 0.7:
        return text.replace(f"[{section}]\n", f"[{section}]\n{name} = {value}\n")
    more = (f"{section}.{key} = {value}\n{text}", f"{text}\n[[{section}]]\n{key} = {value}\n")
    return dice.choice([*more, f"{section} = {{ {key} = {value} }}\n{text}", f"{text}\n{name} = {value}\n"])


def numbers(dice: Dice, text: str) -> str:
    found = dice.choice(list(re.finditer(r"(?<![\w\"'/.])\d[\d.e-]*", text)))
    new = dice.choice(
        [f'"{found[0]}"', f"{found[0]}0", f"-{found[0]}", f"{found[0]}.0", f"{found[0]}e3", f"[{found[0]}]",
         f"{found[0]}k", f"{found[0]}" * 30, f"+{found[0]}", f"0{found[0]}",
         str(dice.randrange(40)), f"{dice.random():.3f}"]
    )  # fmt: skip
    return text[: found.start()] + new + text[found.end() :]


def encodings(dice: Dice, text: str) -> bytes:
    place = dice.randrange(len(text))
    odd = text[:place] + dice.choice(["é", "\u2028", "“", "😀", "\xa0"]) + text[place:]
    return dice.choice(
        [
            text.encode("utf-8-sig"),
            b"\xef\xbb\xbf" * 2 + text.encode(),
            text.replace("\n", "\r\n").encode(),
            text.replace("\n", "\r", dice.randint(1, 99)).encode(),
            text.encode("utf-16"),
            odd.encode("latin-1", "replace"),
            odd.encode("utf-8"),
            text.replace(" = ", "\t=\t").encode(),
            text[:place].encode() + bytes([dice.randrange(256)]) + text[place:].encode(),
        ]
    )


MUTATIONS: tuple[Callable[[Dice, str], str | bytes], ...] = (
    characters, truncated, lines, renamed_key, moved_key, sections, swapped_values, other_value, added_key, numbers,
    encodings,
)  # fmt: skip


def mutants(mutation: Callable[[Dice, str], str | bytes], count: int, seed: int) -> Iterator[bytes]:
    """``count`` distinct run files, none of them one of the two that are changed."""
    dice = random.Random(seed)
    seen = {FULL.encode(), EXAMPLE.encode()}
    while len(seen) < count + 2:
        made = mutation(dice, dice.choice([FULL, FULL, EXAMPLE]))
        content = made.encode() if isinstance(made, str) else made
        if content not in seen:
            seen.add(content)
            yield content


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_mutated_files(tmp_path, mutation):
    outcomes = [check(content, tmp_path / "run.toml") for content in mutants(mutation, 110, seed=3)]
    assert False in outcomes
    assert mutation in (renamed_key, moved_key, added_key) or True in outcomes


@pytest.mark.parametrize("text", [FULL, EXAMPLE, "", "[run]\nseed = 3\n"], ids=["full", "example", "empty", "one"])
def test_the_files_that_are_changed_are_good(tmp_path, text):
    assert check(text.encode(), tmp_path / "run.toml")


def test_the_oracle_sees_a_key_that_is_ignored(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(FULL)
    config = Config.load(path)
    parsed = tomllib.loads(FULL)
    expect_honoured(config, parsed, path)
    for section, table in parsed.items():
        for key in table:
            without = {**parsed, section: {k: v for k, v in table.items() if k != key}}
            if (section, key) in (("trace", "enabled"), ("pipeline", "chunks"), ("run", "dir"), ("run", "name")):
                continue  # the default, or a name that follows from another key
            with pytest.raises((AssertionError, KeyError)):
                expect_honoured(config, without, path)


def test_every_key_with_odd_values(tmp_path):
    dice, good = random.Random(2), 0
    base = "[model]\nlayers = 4\nhidden = 8\nheads = 2\nsequence = 8\n"
    for dotted in KEYS:
        section, key = dotted.split(".")
        for value in dice.sample(VALUES, 8):
            if section == "model":
                text = re.sub(rf"^{key} = .*\n", "", base, flags=re.MULTILINE) + f"{key} = {value}\n"
            else:
                text = f"{base}[{section}]\n{key} = {value}\n"
            good += check(text.encode(), tmp_path / "run.toml")
    assert good > 25
