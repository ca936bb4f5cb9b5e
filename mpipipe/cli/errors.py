"""From an exception to what the user sees: exit code, JSON object, text."""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

from mpipipe.errors import MpipipeError

EXIT_DONE = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_ENVIRONMENT = 3
EXIT_STOPPED = 75


def exit_code(error: BaseException) -> int:
    """2 for what the user asked for, 3 for what the machine lacks, 1 for the rest."""
    return error.exit_code if isinstance(error, MpipipeError) else EXIT_FAILURE


def error_object(error: BaseException) -> dict[str, Any]:
    """``{"error": {"type", "message", "key", "allowed"}}``, ready for ``json.dumps``."""
    allowed = getattr(error, "allowed", None)
    return {
        "error": {
            "type": type(error).__name__,
            "message": message(error),
            "key": getattr(error, "key", None),
            "allowed": allowed if allowed is None or isinstance(allowed, str) else list(allowed),
        }
    }


def message(error: BaseException) -> str:
    """The error's own text with its notes."""
    text = str(error) or type(error).__name__
    return "\n".join([text, *getattr(error, "__notes__", ())])


def report(error: BaseException, *, as_json: bool) -> int:
    """Tell the user of an error and return the exit code.

    Text goes to standard error: one of our own errors as its message, an unexpected one with its traceback. With
    ``as_json`` the object goes to standard output, and the traceback of an unexpected one still to standard error.
    """
    if sys.stdout is not None:  # as with >&-
        sys.stdout.flush()
    expected = isinstance(error, MpipipeError | OSError)
    if as_json:
        print(json.dumps(error_object(error)), flush=True)
    if not expected:
        print("".join(traceback.format_exception(error)), end="", file=sys.stderr, flush=True)
    elif not as_json:
        show_text(message(error))
    return exit_code(error)


def show_text(text: str) -> None:
    """``text`` on standard error, marked as an error."""
    print(f"error: {text}", file=sys.stderr, flush=True)
