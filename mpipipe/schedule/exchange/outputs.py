"""What ``mpipipe schedule show`` and ``convert`` write besides tables: pictures, text, figures, timelines.

Each is written whole or not at all. A file that is there already is replaced only if it is empty, or mpipipe made it
and it is of the same kind; anything else belongs to somebody.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mpipipe.schedule.exchange.files import write_whole

_HEAD = 4 * 1024 * 1024
_PNG = b"\x89PNG\r\n\x1a\n"


class _Form(NamedTuple):
    """A form, in words, and whether the begin of a file is that of one that we made."""

    words: str
    ours: Callable[[bytes], bool]


def _png(head: bytes) -> bool:
    return head.startswith(_PNG) and b"tEXtSoftware\x00mpipipe" in head[:4096]


def _text(head: bytes) -> bool:
    return re.match(rb"rank 0 *\| ", head) is not None


def _json(head: bytes) -> bool:
    return head.startswith(b'{"schedule": ') and b'"rows": [' in head


def _chrome(head: bytes) -> bool:
    return head.startswith(b'{"displayTimeUnit": "ms", "otherData": {"schedule": ')


def _svg(head: bytes) -> bool:
    return head.startswith(b"<svg ") and b"<!-- made by mpipipe -->" in head[:1024]


def _html(head: bytes) -> bool:
    return head.startswith(b"<!DOCTYPE html>") and b'<meta name="generator" content="mpipipe">' in head[:1024]


_FORMS = {
    "png": _Form("a PNG", _png),
    "text": _Form("a drawing as text", _text),
    "json": _Form("figures as JSON", _json),
    "chrome": _Form("a timeline as JSON", _chrome),
    "svg": _Form("an SVG", _svg),
    "html": _Form("an HTML page", _html),
}


def write_output(path: Path, content: str | bytes, form: str) -> None:
    """Write ``content``, of one of the forms png, text, json, chrome, svg and html, under a temporary name beside
    ``path`` that is then renamed. Raises TableFileError, also where a file is there that is to be kept."""
    words, ours = _FORMS[form]
    data = content.encode() if isinstance(content, str) else content

    def same(old: Path) -> bool:
        with open(old, "rb") as file:
            return ours(file.read(_HEAD))

    write_whole(path, lambda part: _write(data, part), same, f"{words} that mpipipe made")


def _write(data: bytes, path: Path) -> None:
    with open(path, "wb") as file:
        file.write(data)
