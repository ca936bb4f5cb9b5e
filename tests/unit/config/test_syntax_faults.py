"""Files that are no TOML: the line, what stands there, and what to change."""

from __future__ import annotations

import pytest

from mpipipe.config import Config
from mpipipe.errors import ConfigError


def error_of(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        Config.load(path, overrides)
    assert caught.value.seen_alike
    return caught.value


SYNTAX = {
    b"[model\n": "line 1 ([model): the section's name is not closed: write [section]",
    b"[run]\nseed 1\n": "line 2 (seed 1): there is no = behind the key: write key = value",
    b"[run]\nseed =\nsteps = 3": "line 2 (seed =): no value: write a number, true, false, a list in brackets, "
    "or text in "
    "quotes",
    b"[pipeline]\n\nschedule = gpipe": "line 3 (schedule = gpipe): no value: write a number, true, false, a list in "
    "brackets, or text in quotes",
    b"[run]\nseed = 1\nseed = 2\n": "line 3 (seed = 2): this key or section is there twice: keep one",
    b"[run]\n[lr]\n[run]\n": "line 3 ([run]): this section is there twice, or a key has its name: keep one",
    b"[run]\nname = 'x\nseed = 1\n": "line 2 (name = 'x): text without its closing quote",
    b"[data]\ntrain = ['a',\n\n": "line 2 (train = ['a',): no value: write a number, true, false, a list in "
    "brackets, or "
    "text in quotes",
    b"[run]\nname = 'caf\xe9'": "line 2 holds the byte 0xe9, which is no UTF-8 text: save the file as UTF-8",
    b"\xff\xfe[\x00": "line 1 begins as UTF-16, and a run file is UTF-8 text: save it as UTF-8",
    b"a = [1, " + b"[" * 5000: "line 1 (a = [1, " + "[" * 49 + "...): brackets are nested too deeply: no value "
    "of a run file "
    "needs more than one pair",
    b"[run]\na = " + b"9" * 5000: "line 2 (a = " + "9" * 53 + "...): a number of too many digits",
    b"[run]\n" + b"x = 1 " * 20: "line 2, column 7 (" + "x = 1 " * 9 + "x =...): the value is none, or "
    "something stands "
    "behind it: write key = value, or [section]",
}


@pytest.mark.parametrize(("content", "text"), SYNTAX.items(), ids=lambda part: repr(part)[:20])
def test_what_is_no_toml_names_the_line(tmp_path, content, text):
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    assert str(error_of(path)) == f"{path}: {text}"
