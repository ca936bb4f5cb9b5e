#!/usr/bin/env python3
"""Stages that sleep instead of computing, through mpipipe's trainer over MPI: every schedule's step against the
simulator's makespan, with many more ranks than cores.

    python tools/bench_sleeping.py                                          p = 4, forward 20 ms, backward 40 ms
    python tools/bench_sleeping.py -p 4 8 16
    python tools/bench_sleeping.py --forward-ms 2 --backward-ms 4 --schedule 1f1b gpipe

A forward takes --forward-ms, a backward --backward-ms, each half of a split backward half of that: the stage's methods
sleep and compute nothing, all else is the trainer's, its engine's and transport's own. Messages have 64 KiB; the trace
is on, the optimizer and the exchange of the loss count. In turn with its steps, in the same launch, a bare loop runs:
the table's rows with the same sleeps and plain MPI calls, Test with naps of 50 us, and nothing else.

Printed: the median step from barrier to barrier, after one that warms up; the simulator's makespan; the excess of the
step over it; by the trace that of the pipeline alone, and the pipeline's over the makespan with the costs that the
actions had; the processor time of all ranks as a share of the cores; the same of the bare loop, and mpipipe's excess
over its. A table that would take more than a minute is left out unless --long is given. Sleeping takes no core, but
other work on the machine makes every figure worse: the load is told. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_engine import end, environment, mpi_launcher
from bench_sleepers import WARM

from mpipipe.environment import available_cores
from mpipipe.errors import MpipipeError, ScheduleError
from mpipipe.schedule import Costs, build, simulate
from mpipipe.schedule.registry import FAMILIES

LONG_S = 60.0
RANK = Path(__file__).resolve().parent / "bench_sleepers.py"
LOOPED = ("interleaved", "looped-bfs", "interleaved-zb")  # two chunks a rank, where one would be another schedule


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-p", nargs="+", type=int, default=[4], help="ranks; a launch for each number")
    parser.add_argument("-m", type=int, help="microbatches a step (default: 16, 2 p if that is more)")
    names = "NAME or NAME@CHUNKS (default: every schedule with one copy of each stage)"
    parser.add_argument("--schedule", nargs="+", help=names)
    parser.add_argument("--bare", nargs="*", default=["1f1b", "gpipe"], help="schedules that the bare loops run too")
    parser.add_argument("--forward-ms", type=float, default=20.0)
    parser.add_argument("--backward-ms", type=float, default=40.0)
    parser.add_argument("--steps", type=int, default=3, help="steps timed")
    parser.add_argument("--kib", type=int, default=64, help="size of a message")
    parser.add_argument("--long", action="store_true", help="also tables that take more than a minute")
    return parser.parse_args()


# --- the launches ---


def schedules_of(names: list[str] | None) -> list[tuple[str, int | None]]:
    """(schedule, chunks a rank)."""
    if names is None:
        return [(family.name, 2 if family.name in LOOPED else family.default_chunks) for family in FAMILIES.values()]
    parts = [text.partition("@") for text in names]
    return [(name, int(chunks) if chunks else None) for name, _, chunks in parts]


def cases_of(given: argparse.Namespace, p: int) -> Iterator[dict[str, Any]]:
    """What a launch runs; ``left_out`` says why a schedule is not."""
    m = given.m or max(16, 2 * p)
    for name, chunks in schedules_of(given.schedule):
        case: dict[str, Any] = {"p": p, "schedule": name, "v": chunks, "m": m}
        try:
            table = build(name, p=p, m=m, v=chunks)
        except ScheduleError as error:
            yield {**case, "left_out": str(error)}
            continue
        case["v"] = table.v
        if table.mirror is not None:
            if given.schedule is not None:
                yield {**case, "left_out": "keeps two copies of each stage, and is not executed"}
            continue
        half_s = given.backward_ms / 2e3
        case["simulated_s"] = simulate(table, Costs(F=given.forward_ms / 1e3, I=half_s, W=half_s)).makespan
        case["bare"] = name in given.bare
        case["whole_s"] = (WARM + given.steps) * (1 + 2 * case["bare"]) * case["simulated_s"]
        if case["whole_s"] > LONG_S and not given.long:
            case["left_out"] = f"would take {case['whole_s']:.0f} s (--long)"
        yield case


def launch(given: argparse.Namespace, p: int, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of one launch, each as soon as it is there. Raises RuntimeError when it fails or does not end."""
    launcher, _ = mpi_launcher()
    limit_s = 120 + 3 * sum(case["whole_s"] for case in cases)
    with tempfile.TemporaryDirectory(prefix="bench-sleeping-") as folder:
        told = {"cases": cases, "forward_s": given.forward_ms / 1e3, "backward_s": given.backward_ms / 1e3,
                "steps": given.steps, "values": given.kib * 256, "folder": folder, "limit_s": limit_s}  # fmt: skip
        command = [*launcher, "-n", str(p), sys.executable, str(RANK), json.dumps(told)]
        with open(Path(folder) / "errors", "w+", encoding="utf-8") as errors:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment(),
                cwd=folder,
                start_new_session=True,
            )
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if line.startswith('{"schedule"'):
                        yield json.loads(line)
                process.wait(timeout=30)
            except BaseException:
                end(process)
                raise
            if process.returncode:
                errors.seek(0)
                raise RuntimeError(f"exit code {process.returncode}:\n" + "".join(errors.readlines()[-15:]))


COLUMNS = (  # title, key, form, width
    ("p", "p", "{}", 3), ("schedule", "schedule", "{}", 16), ("v", "v", "{}", 2), ("m", "m", "{}", 4),
    ("step ms", "step_ms", "{:.1f}", 8), ("simulated", "simulated_ms", "{:.1f}", 9),
    ("excess", "excess", "{:.2%}", 7), ("pipeline", "pipeline_excess", "{:.2%}", 8),
    ("own costs", "excess_over_own_costs", "{:.2%}", 9), ("cores", "core_share", "{:.1%}", 6),
    ("bare", "bare_excess", "{:.2%}", 7), ("its cores", "bare_core_share", "{:.1%}", 9),
    ("ours/it", "excess_over_bare", "{:.2f}", 7),
)  # fmt: skip


def show(cells: list[str]) -> None:
    """One line; the schedule to the left."""
    line = [cell.rjust(width) for cell, (*_, width) in zip(cells, COLUMNS, strict=True)]
    line[1] = cells[1].ljust(COLUMNS[1][3])
    print(" ".join(line), flush=True)


def main() -> int:
    given = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by an exception, so that a launch ends with us
    load = f"{os.getloadavg()[0]:.1f} before"
    print(f"forward {given.forward_ms:g} ms, backward {given.backward_ms:g} ms, messages of {given.kib} KiB, "
          f"{available_cores()} cores, load {load}, {given.steps} steps each, {mpi_launcher()[1]}")  # fmt: skip
    show([title for title, *_ in COLUMNS])
    rows, left_out = [], []
    try:
        for p in given.p:
            cases = list(cases_of(given, p))
            left_out += [case for case in cases if "left_out" in case]
            runs = [case for case in cases if "left_out" not in case]
            for row in launch(given, p, runs) if runs else ():
                rows.append(row)
                show([form.format(row[key]) if key in row else "" for _, key, form, _ in COLUMNS])
    except (MpipipeError, RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        return 1
    for case in left_out:
        print(f"p = {case['p']}, {case['schedule']}: left out, {case['left_out']}")
    print(f"load {load}, {os.getloadavg()[0]:.1f} after")
    print(json.dumps({"forward_ms": given.forward_ms, "backward_ms": given.backward_ms, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
