#!/usr/bin/env python3
"""What mpipipe does on this machine's GPU: every check of the GPU path, in one run, with one report at its end.

    python tools/device_check.py                                    on a machine with an NVIDIA GPU, 6 minutes
    python tools/device_check.py --output docs/results              also writes docs/results/DEVICE_DATE.md
    python tools/device_check.py --only bits engine                 some of the checks (--list names them)
    python tools/device_check.py --device cpu --small               the same on the CPU: tries the script itself

Runs from the source tree: mpipipe need not be installed, and nothing is installed or downloaded. Needs torch with CUDA,
CuPy, NumPy and what mpipipe itself needs; what is missing is a result. One GPU is shared by all ranks. Each check is a
process of its own with a time limit: one that crashes, hangs or answers nonsense is a result too, and the others go on.
Checks come in the order of their worth; those for which no time is left are told. At the end: a table, and one line of
JSON. Exit code 0 where nothing is wrong, else 1. Needs nothing but Python itself to start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from device_check_answers import ENDS_WITHIN_S, ROOT, end_all, last_words
from device_check_wheels import environment, unpack

CHECK_MARK = "MPIPIPE_DEVICE_CHECK"
LEAST_S = 5.0
"""With less time left no check is begun."""
PATIENCE_CPU = 4.0
"""Times the limit of each check in a dry run, on cores that others use too."""
LEVELS = ("ok", "wrong", "missed", "absent", "crashed", "late", "no time")
BAD = ("wrong", "crashed", "late")
WORDS = {
    "ok": "as it should be, or measured without a goal",
    "wrong": "not as it should be",
    "missed": "measured, and short of its goal",
    "absent": "can't be tried here",
    "crashed": "the check ended without an answer",
    "late": "the check did not end in time",
    "no time": "not run: time",
}


@dataclass(frozen=True)
class Check:
    """``command``: without settings and answers, which are put behind it; ``limit_s``: it has no longer."""

    name: str
    what: str
    command: tuple[str, ...]
    limit_s: float


@dataclass
class Result:
    """One line of the report."""

    check: str
    case: str
    level: str
    text: str
    figures: dict[str, Any] = field(default_factory=dict)


def _script(name: str, check: str) -> tuple[str, ...]:
    return sys.executable, str(ROOT / "tools" / f"device_check_{name}.py"), check


CHECKS = tuple(
    Check(name, what, _script(script, name), limit_s)
    for name, script, limit_s, what in (
        ("there", "there", 60, "versions, the GPU, the MPI library and its launcher"),
        ("contract", "there", 50, "the contract of a device, over the real one"),
        ("bits", "bits", 90, "the same bits with 1, 2 and 4 ranks as threads, on both paths"),
        ("engine", "engine", 75, "the engine at one rank beside a plain torch loop"),
        ("bits-mpi", "bits", 80, "the same bits with 2 and 4 ranks over MPI"),
        ("idle", "runs", 60, "idle time between actions, from the trace"),
        ("staged", "copies", 50, "copies between GPU and host beside bare ones; messages over MPI"),
        ("memory", "runs", 50, "receive buffers and peak memory against the table"),
        ("aware", "there", 75, "messages out of GPU memory by a UCX that can"),
        ("doctor", "there", 45, "what mpipipe doctor says"),
    )
)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tries the script")
    parser.add_argument("--small", action="store_true", help="small models, for other GPUs than an H200")
    parser.add_argument("--minutes", type=float, default=6.0, help="time for all checks together (default: 6)")
    names = [check.name for check in CHECKS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="CHECK", help="these checks alone")
    parser.add_argument("--list", action="store_true", help="name the checks and end")
    parser.add_argument("--output", type=Path, help="a file for the report as Markdown, or a folder")
    parser.add_argument("--no-mpi", action="store_true", help="start no MPI ranks")
    parser.add_argument("--ucx", type=Path, help="folder of a UCX with CUDA (default: the Python package libucx)")
    parser.add_argument("--wheels", type=Path, help="folder of wheels of what is missing here (device_check_wheels.py)")
    return parser.parse_args(arguments)


# --- one check ---


def child_environment(mark: str) -> dict[str, str]:
    """This checkout's mpipipe, one thread, deterministic matrix products."""
    found = dict(os.environ)
    paths = [str(ROOT), found.get("PYTHONPATH", "")]
    found |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), CHECK_MARK: mark, "PYTHONUNBUFFERED": "1"}
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        found.setdefault(name, "1")
    found["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return found


def read_answers(path: Path, check: str) -> tuple[list[Result], dict[str, Any], int]:
    """Results, settings for later checks, and how many lines are neither."""
    results: list[Result] = []
    settings: dict[str, Any] = {}
    nonsense = 0
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        try:
            found = json.loads(line)
            if "settings" in found:
                settings |= found["settings"]
                continue
            if found["level"] not in LEVELS or not isinstance(found["figures"], dict):
                raise ValueError(found["level"])
            results.append(Result(check, str(found["case"]), found["level"], str(found["text"]), found["figures"]))
        except (ValueError, KeyError, TypeError):
            nonsense += 1
    return results, settings, nonsense


def end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End a check and all that it started: politely, so that a launcher ends its ranks; then by force."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_WITHIN_S)
            break
    end_all(CHECK_MARK, mark)


def run_check(check: Check, settings: dict[str, Any], limit_s: float) -> tuple[list[Result], dict[str, Any]]:
    """Start one check; its results and what it found for later ones. Never raises for what the check does; who ends
    this meanwhile is ``stopped`` among the settings.
    """
    mark, stopped = uuid.uuid4().hex, ""
    with tempfile.TemporaryDirectory(prefix="device-check-") as folder:
        path, said = Path(folder) / "answers.jsonl", Path(folder) / "said.txt"
        given = settings | {"limit_s": limit_s, "ends": time.time() + limit_s}
        code: int | None = None
        with said.open("wb") as output:
            try:
                process = subprocess.Popen(
                    [*check.command, json.dumps(given), str(path)],
                    env=child_environment(mark),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=folder,
                    start_new_session=True,
                )
            except OSError as error:
                return [Result(check.name, check.name, "crashed", f"does not start: {error}")], {}
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(limit_s)
            except KeyboardInterrupt as error:
                stopped = str(error) or "SIGINT"
            finally:
                end(process, mark)
        words = last_words(said.read_text(encoding="utf-8", errors="replace"))
        results, found, nonsense = read_answers(path, check.name)
    if stopped:
        results.append(Result(check.name, check.name, "late", f"ended from outside ({stopped}); last words: {words}"))
        found["stopped"] = stopped
    elif code is None:
        text = f"no end within {limit_s:.0f} s; last words: {words}"
        results.append(Result(check.name, check.name, "late", text))
    elif code != 0:
        results.append(Result(check.name, check.name, "crashed", f"{code_text(code)}; last words: {words}"))
    elif nonsense or not results:
        what = f"{nonsense} answers make no sense" if nonsense else "no answer"
        results.append(Result(check.name, check.name, "crashed", f"{what}; last words: {words}"))
    return results, found


def code_text(code: int) -> str:
    """``exit code 1``, or ``ended by SIGKILL``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


# --- all of them ---


class Report:
    """What was found so far; written anew after every check, so that nothing is lost where this is ended itself."""

    def __init__(self, settings: dict[str, Any], output: Path | None) -> None:
        self.results: list[Result] = []
        self.settings = settings
        self.seconds: dict[str, float] = {}
        self._output = output
        self._begun, self._date = time.monotonic(), time.strftime("%Y-%m-%d")

    def add(self, results: list[Result], seconds: float) -> None:
        self.results += results
        if results:
            self.seconds[results[0].check] = round(seconds, 1)
        if self._output is not None:
            try:
                self._write(self._output)
            except OSError as error:
                print(f"{self._output} can't be written: {error}", file=sys.stderr)

    def device(self) -> str:
        return str(self.settings.get("device_name") or self.settings["device"])

    def line(self, output: Path | None = None) -> str:
        """Everything in one line of JSON; with ``output`` the results' names alone, and the file that has the rest."""
        counts = {level: sum(row.level == level for row in self.results) for level in LEVELS}
        whole = {
            "device_check": 1,
            "device": self.device(),
            "date": self._date,
            "small": self.settings["small"],
            "total_s": round(time.monotonic() - self._begun, 1),
            "seconds": self.seconds,
            "counts": counts,
            "results": [asdict(row) for row in self.results],
        }
        if output is not None:
            whole["results"] = [[row.check, row.case, row.level] for row in self.results]
            whole["file"] = str(self.path(output))
        return json.dumps(whole)

    def table(self, width: int = 150) -> str:
        """A line a result; long texts go on below."""
        heads = [(row.check, row.case, row.level) for row in self.results]
        first, second, third = (max([len(head[k]) for head in heads] + [5]) for k in range(3))
        rows = [f"{'check':{first}}  {'case':{second}}  {'is':{third}}  what was seen"]
        indent = " " * (first + second + third + 6)
        for row in self.results:
            head = f"{row.check:{first}}  {row.case:{second}}  {row.level:{third}}  "
            rows.append(textwrap.fill(row.text, max(width, len(indent) + 40), initial_indent=head,
                                      subsequent_indent=indent, break_on_hyphens=False))  # fmt: skip
        return "\n".join(rows)

    def path(self, output: Path) -> Path:
        """The file of a report: ``output`` itself, or DEVICE_DATE.md in that folder."""
        if output.suffix == ".md":
            return output
        name = re.sub(r"[^a-z0-9]+", "-", self.device().lower()).strip("-")
        return output / f"{name}_{self._date}.md"

    def markdown(self) -> str:
        rows = [f"# {self.device()}, {self._date}", ""]
        command = " ".join(["python", "tools/device_check.py", *sys.argv[1:]])
        dry = self.settings["device"] == "cpu"
        where = "A dry run on the CPU: nothing here was seen on a GPU." if dry else "One GPU, shared by all ranks."
        rows += [f"Written by `{command}`. {where}", ""]
        rows += [f"- {level}: {words}" for level, words in WORDS.items()]
        rows += ["", "| check | case | is | what was seen |", "|---|---|---|---|"]
        for row in self.results:
            rows.append("| " + " | ".join(_cell(text) for text in (row.check, row.case, row.level, row.text)) + " |")
        rows += ["", "Seconds: " + ", ".join(f"{name} {taken}" for name, taken in self.seconds.items()) + "."]
        return "\n".join([*rows, "", "```json", self.line(), "```", ""])

    def _write(self, output: Path) -> None:
        path = self.path(output)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.markdown(), encoding="utf-8")

    @property
    def is_bad(self) -> bool:
        return any(row.level in BAD for row in self.results)


def _cell(text: str) -> str:
    """In one line, and nothing in it is Markdown."""
    return " ".join(text.replace("|", "\\|").replace("`", "'").replace("<", "&lt;").split())


def run_all(checks: Sequence[Check], report: Report, minutes: float) -> None:
    """Every check in turn, as long as there is time."""
    ends = time.monotonic() + 60 * minutes
    for check in checks:
        left = ends - time.monotonic()
        if left < LEAST_S:
            report.add([Result(check.name, check.name, "no time", f"not run: time ({check.what})")], 0.0)
            continue
        print(f"{check.name}: {check.what}", file=sys.stderr, flush=True)
        begun = time.monotonic()
        limit_s = check.limit_s * (PATIENCE_CPU if report.settings["device"] == "cpu" else 1.0)
        results, found = run_check(check, report.settings, min(limit_s, left))
        report.settings |= found
        report.add(results, time.monotonic() - begun)
        if "stopped" in found:
            raise KeyboardInterrupt(found["stopped"])


def stop(number: int, frame: object) -> None:
    """Who ends this gets the report of what was found so far."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse_arguments(arguments)
    if given.list:
        print("\n".join(f"{check.name:10s}{check.what}" for check in CHECKS))
        return 0
    signal.signal(signal.SIGTERM, stop)
    settings: dict[str, Any] = {
        "device": given.device,
        "small": given.small,
        "mpi": not given.no_mpi,
        "launcher": None,
        "ucx": str(given.ucx.resolve()) if given.ucx else None,
    }
    report = Report(settings, given.output)
    wanted = [check for check in CHECKS if not given.only or check.name in given.only or check.name == "there"]
    with tempfile.TemporaryDirectory(prefix="device-check-wheels-", ignore_cleanup_errors=True) as prefix:
        try:
            if given.wheels:
                told = "; ".join(unpack(given.wheels, Path(prefix)))
                os.environ.update(environment(Path(prefix), os.environ))
                report.add([Result("wheels", "wheels", "ok", told)], 0.0)
            run_all(wanted, report, given.minutes)
        except KeyboardInterrupt as error:
            text = f"ended from outside ({error}): the rest was not run"
            report.add([Result("device_check", "all", "late", text)], 0.0)
    print(report.table())
    print(report.line() if given.output is None else report.line(given.output), flush=True)
    return int(report.is_bad)


if __name__ == "__main__":
    sys.exit(main())
