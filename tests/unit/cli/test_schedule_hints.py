"""What ``schedule show`` says below a table, and what a terminal gets of a wide one."""

from __future__ import annotations

import io
import re
import sys

import pytest

from mpipipe.cli import main


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[str]:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["schedule", "show", *arguments]) == 0
    return screen.getvalue().splitlines()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["interleaved"], "with one chunk a rank interleaved is 1f1b: -v 2 gives each rank two"),
        (["looped-bfs", "-p", "2"], "with one chunk a rank looped-bfs is gpipe: -v 2 gives each rank two"),
        (["interleaved", "-v", "2"], "1F0 is stage 1's forward of microbatch 0; F forward, B backward"),
        (
            ["zb-v"],
            "1F0 is stage 1's forward of microbatch 0; "
            "F forward, I input half of a backward, W weight half of a backward",
        ),
    ],
)
def test_a_line_below_the_figures(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert main(["schedule", "show", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == said
    assert lines[-2].startswith("peak activations per rank: ")


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
def test_no_remark_where_there_is_nothing_to_say(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main(["schedule", "show", name]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("peak activations per rank: ")


@pytest.mark.parametrize("colour", ["never", "always"])
def test_a_terminal_gets_200_columns_and_a_pipe_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, colour: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    wide = ["gpipe", "-p", "4", "-m", "50", "--colour", colour]
    assert main(["schedule", "show", *wide]) == 0
    whole = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in capsys.readouterr().out.splitlines()]
    longest = max(len(line) for line in whole[:4])
    assert longest > 400
    shown = on_terminal(monkeypatch, *wide)
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in shown]
    assert plain[:4] == [line[:200] for line in whole[:4]]
    assert [line for line in plain if line.startswith("(the first 200 of ")]
    assert plain[-2:] == whole[-2:]
    for line in shown[:4]:
        assert (not re.search(r"\x1b\[[1-9]", line)) or line.endswith("\x1b[0m")
    monkeypatch.setenv("COLUMNS", "1000")
    assert [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in on_terminal(monkeypatch, *wide)] == whole
