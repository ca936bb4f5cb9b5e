"""The command line. ``main`` is all that it offers; each verb group is a file, and what a verb needs is imported when
it runs."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``mpipipe`` with ``argv`` (default: the process's own arguments) and return its exit code.

    0 done; 2 usage or configuration; 3 environment; 75 stopped after saving, start again; 1 anything else.
    """
    from mpipipe.cli.app import run

    return run(argv)
