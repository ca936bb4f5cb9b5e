"""Runs one rank's row of a schedule table."""

from __future__ import annotations

from mpipipe.engine.engine import Engine, RunResult
from mpipipe.engine.feed import Feed
from mpipipe.engine.program import Op, RankProgram, compile_program

__all__ = ["Engine", "Feed", "Op", "RankProgram", "RunResult", "compile_program"]
