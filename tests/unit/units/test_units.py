"""Durations and sizes: what is read, what is refused, how they are written."""

from __future__ import annotations

import pytest

from mpipipe.errors import ConfigError
from mpipipe.units import format_bytes, format_seconds, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3h50m", 13800.0), ("90s", 90.0), ("1d 12h", 129600.0), ("1.5h", 5400.0), ("500ms", 0.5), ("2min", 120.0)],
)
def test_duration(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "3", "3x", "h", "3h3h", "-1s", "0s", "1e3s", "1h,2m", "٣s", "9" * 400 + "s"])
def test_no_duration(text):
    with pytest.raises(ConfigError, match="duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 us"),
        (4.1e-7, "0.41 us"),
        (0.0123, "12.3 ms"),
        (0.9999, "1.00 s"),
        (59.99, "1m00s"),
        (200, "3m20s"),
        (13800, "3h50m"),
        (187200, "2d04h"),
        (-0.5, "-500 ms"),
        (float("inf"), "inf"),
    ],
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (80 * 2**30, "80.0 GiB"), (2**50, "1024 TiB")],
)
def test_format_bytes(nbytes, text):
    assert format_bytes(nbytes) == text
