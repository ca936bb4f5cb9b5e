#!/usr/bin/env python3
"""mpipipe's engine beside a bare mpi4py loop and torch.distributed.pipelining (gloo): the same training in one run.

    python tools/bench_engine.py                                  tiny layers: overhead per action
    python tools/bench_engine.py --model mlp                      messages of 4 MiB, little compute
    python tools/bench_engine.py --model gpt --schedule 1f1b gpipe interleaved@2 looped-bfs@2 interleaved-zb@2 zb-v
    python tools/bench_engine.py --model mlp --environment UCX_TLS=tcp,self MPIR_CVAR_NOLOCAL=1     MPICH over TCP

In each round every loop is started in turn, mpipipe first: a launch of its own, one thread a rank, mpipipe's trace on,
AdamW counted, no clipping. Printed: medians over the rounds, and ratios, the median of those within a round; of
mpipipe also the step over the simulator's makespan with the costs that its own trace of these steps has, and what the
trace costs: its events times the time of one. A loop that can't run is told and left out. The last line is JSON. Steps
of a shared machine drift by some per cent: compare within one run only. Torch's gloo goes over TCP, whatever MPI does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mpipipe.analysis.load import load_segment
from mpipipe.analysis.summary import measured_costs, step_bounds
from mpipipe.cli.bench_engine import event_cost_s
from mpipipe.errors import MpipipeError
from mpipipe.schedule import build, simulate

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "tools" / "bench_peers.py"
LOOPS = {"ours": "mpipipe", "bare": "bare mpi4py loop", "torch": "torch.pipelining, gloo"}
DEFAULTS = {  # microbatches, steps that warm up, steps timed
    "tiny": (64, 5, 40),
    "mlp": (16, 2, 10),
    "gpt": (8, 1, 5),
}
SAME_LOSS = 1e-4  # relative; the loops add up in other orders

Key = tuple[str, str]
"""(loop, schedule)."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=DEFAULTS, default="tiny")
    names = "names of mpipipe's schedules; NAME@2: two stages a rank"
    parser.add_argument("--schedule", nargs="+", default=["1f1b"], help=names)
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=list(LOOPS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-p", type=int, default=2, help="ranks")
    parser.add_argument("-m", type=int, help="microbatches a step (default: tiny 64, mlp 16, gpt 8)")
    parser.add_argument("--warm", type=int, help="steps before the timed ones (default: tiny 5, mlp 2, gpt 1)")
    parser.add_argument("--steps", type=int, help="steps timed in a launch (default: tiny 40, mlp 10, gpt 5)")
    parser.add_argument("--rows", type=int, default=16384, help="mlp: rows of a microbatch")
    parser.add_argument("--width", type=int, default=64, help="mlp: width of the layers")
    parser.add_argument("--blocks", type=int, nargs="+", help="gpt: blocks of each stage (default: by cost)")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--num-blocks", type=int, default=8)
    variables = "variables of the MPI loops, as UCX_TLS=tcp,self"
    parser.add_argument("--environment", nargs="+", default=[], metavar="KEY=VALUE", help=variables)
    parser.add_argument("--no-trace", action="store_true", help="mpipipe without its trace")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one launch")
    given = parser.parse_args()
    wrong = [text for text in given.environment if not text.partition("=")[0] or "=" not in text]
    if wrong:
        parser.error(f"--environment {wrong[0]}: KEY=VALUE is wanted")
    return given


# --- what is trained ---


def split_blocks(num_blocks: int, stages: int, head: float) -> list[int]:
    """Blocks of each stage so that the dearest stage is cheapest; the last one also has the head, worth ``head``
    blocks.
    """

    def others(last: int) -> list[int]:
        rest, count = num_blocks - last, stages - 1
        return [rest // count + (stage < rest % count) for stage in range(count)]

    if stages == 1:
        return [num_blocks]
    return min(([*others(last), last] for last in range(num_blocks)), key=lambda cut: max(*cut[:-1], cut[-1] + head))


def layers_of(given: argparse.Namespace, stages: int) -> list[int]:
    """Layers of each stage, first to last."""
    if given.model != "gpt":
        return [1] * stages
    cut = given.blocks
    if cut is None or len(cut) != stages:  # --blocks is for one number of stages, others are cut by cost
        cut = split_blocks(given.num_blocks, stages, given.vocab / (12 * given.hidden))
    return [blocks + (stage == 0) + (stage == stages - 1) for stage, blocks in enumerate(cut)]


def make_case(given: argparse.Namespace, schedule: str) -> dict[str, Any]:
    """The fields of ``bench_layers.Case``. ``schedule``: a name, or NAME@CHUNKS."""
    name, _, chunks = schedule.partition("@")
    m, warm, steps = (
        default if value is None else value
        for value, default in zip((given.m, given.warm, given.steps), DEFAULTS[given.model], strict=True)
    )
    table = build(name, p=given.p, m=m, v=int(chunks) if chunks else None)
    sizes = {"rows": 2, "width": 8} if given.model == "tiny" else {"rows": given.rows, "width": given.width}
    if given.model == "gpt":
        sizes = {"hidden": given.hidden, "heads": 8, "sequence": given.sequence, "vocab": given.vocab}
    return {
        "model": given.model,
        "schedule": name,
        "p": given.p,
        "v": table.v,
        "m": m,
        "layers": layers_of(given, table.num_stages),
        "sizes": sizes,
        "warm": warm,
        "steps": steps,
        "trace": not given.no_trace,
    }


# --- launches ---


def mpi_launcher() -> tuple[list[str], str]:
    """mpirun beside this Python, else that of PATH, with what it needs on one machine; and the library's name."""
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise FileNotFoundError("no mpirun, neither beside this Python nor on PATH")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" in version:
        return [mpirun, "--oversubscribe", "--bind-to", "none"], "Open MPI"
    return [mpirun], "MPICH"


def command_of(loop: str, case: dict[str, Any]) -> list[str]:
    """The command line of one launch."""
    script = [str(PEERS), loop, json.dumps(case)]
    if loop == "torch":
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case["p"])]
        return [sys.executable, *start, *script]
    return [*mpi_launcher()[0], "-n", str(case["p"]), sys.executable, *script]


def environment(more: Iterable[str] = ()) -> dict[str, str]:
    """One thread a rank, this checkout's mpipipe, and ``more``: KEY=VALUE each."""
    found = dict(os.environ)
    found |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), found.get("PYTHONPATH"))))
    if os.geteuid() == 0:
        found |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return found | dict(text.split("=", 1) for text in more)


def end(process: subprocess.Popen[str]) -> None:
    """End a launcher and its ranks: politely, so that it ends ranks in sessions of their own; then by force."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=10)
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def launch(loop: str, case: dict[str, Any], timeout_s: float, more: Iterable[str] = ()) -> dict[str, Any]:
    """The line of one launch, with what our own trace says; ``unavailable`` says why there are no figures. ``more``:
    variables of its environment.
    """
    with tempfile.TemporaryDirectory(prefix="bench-engine-") as folder:
        try:
            command = command_of(loop, {**case, "folder": str(Path(folder) / "run")})
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment(more),
                cwd=folder,
                start_new_session=True,
            )
        except OSError as error:
            return {"unavailable": str(error)}
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException as stop:
            end(process)
            if not isinstance(stop, subprocess.TimeoutExpired):
                raise
            return {"unavailable": f"no end within {timeout_s:g} s (--timeout)"}
        start = output.find('{"bench"')
        if process.returncode == 0 and start >= 0:  # ranks may print at once, on one line
            figures: dict[str, Any] = json.JSONDecoder().raw_decode(output, start)[0]
            if loop == "ours" and case["trace"]:
                figures |= trace_figures(Path(folder), case["warm"], figures["step_s"])
            return figures
    tail = [line for line in (errors + output).splitlines() if line.strip()][-12:]
    return {"unavailable": f"exit code {process.returncode}:\n    " + "\n    ".join(tail or ["no output"])}


def trace_figures(folder: Path, warm: int, step_s: float) -> dict[str, float]:
    """What the trace of the steps after the first ``warm`` says, medians of them. ``simulated_s``: makespan of their
    table with the mean cost of each stage's F, B, I and W in the step; ``makespan_s``: the step's own; ``trace_share``:
    of the step, events of the rank that has most times the time of one.
    """
    segment = load_segment(folder / "run")
    steps = [step for step in segment.steps if step > warm]
    table = segment.table_of(steps[0])
    assert table is not None
    simulated = [simulate(table, measured_costs(segment, frozenset([step]))).makespan / 1e9 for step in steps]
    bounds = [step_bounds(segment, step) for step in steps]
    makespans = [(last - first) / 1e9 for first, last in bounds]
    events = max(sum(len(one.events_of(step)) for step in steps) / len(steps) for one in segment.ranks.values())
    event_s = event_cost_s(folder / "cost")
    return {
        "simulated_s": statistics.median(simulated),
        "makespan_s": statistics.median(makespans),
        "step_over_simulated": step_s / statistics.median(simulated),
        "makespan_over_simulated": statistics.median(a / b for a, b in zip(makespans, simulated, strict=True)),
        "events_per_step": events,
        "event_s": event_s,
        "trace_share": events * event_s / step_s,
    }


def run_rounds(
    given: argparse.Namespace, cases: dict[str, dict[str, Any]]
) -> tuple[dict[Key, list[dict[str, Any]]], dict[Key, str]]:
    """Figures of each loop and schedule, one entry a round; and of what can't run, the reason."""
    found: dict[Key, list[dict[str, Any]]] = {(loop, s): [] for s in given.schedule for loop in given.loops}
    missing: dict[Key, str] = {}
    for round_number in range(given.rounds):
        for key in list(found):
            figures = launch(key[0], cases[key[1]], given.timeout, given.environment if key[0] != "torch" else ())
            if "unavailable" in figures:
                missing[key] = figures["unavailable"]
                del found[key]
                continue
            found[key].append(figures)
            text = f"round {round_number + 1}: {LOOPS[key[0]]}, {key[1]}: {figures['step_s'] * 1e3:.3f} ms"
            print(text, file=sys.stderr, flush=True)
    return found, missing


# --- what is told ---


def median_of(rows: list[dict[str, Any]], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def ratio(found: dict[Key, list[dict[str, Any]]], one: Key, other: Key) -> dict[str, float]:
    """The step time of one loop over another's, within each round."""
    pairs = zip(found[one], found[other], strict=True)
    values = [mine["step_s"] / theirs["step_s"] for mine, theirs in pairs]
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def models_of(found: dict[Key, list[dict[str, Any]]]) -> list[list[Key]]:
    """The keys that train one model: the tiny layers and the mlp are as many as there are stages."""
    groups: dict[int, list[Key]] = {}
    for key, rows in found.items():
        if rows:
            groups.setdefault(sum(rows[0]["layers"]), []).append(key)
    return list(groups.values())


def ratios_of(found: dict[Key, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Ours over each peer with the same schedule; with several schedules of one model our best over the peer's best,
    and each over the loop's own 1f1b.
    """
    told = {}
    for loop in ("bare", "torch"):
        for key in found:
            peer = (loop, key[1])
            if key[0] == "ours" and peer in found:
                told[f"ours/{loop} {key[1]}"] = ratio(found, key, peer)
        for keys in models_of(found):
            mine, theirs = ([key for key in keys if key[0] == name] for name in ("ours", loop))
            if mine and theirs and len(mine) + len(theirs) > 2:
                best, other = (min(some, key=lambda key: median_of(found[key], "step_s")) for some in (mine, theirs))
                told[f"ours/{loop} best: {best[1]} over {other[1]}"] = ratio(found, best, other)
    for keys in models_of(found):
        for key in keys:
            if key[1] != "1f1b" and (key[0], "1f1b") in keys:
                told[f"{key[0]} {key[1]}/1f1b"] = ratio(found, key, (key[0], "1f1b"))
    return told


def other_losses(found: dict[Key, list[dict[str, Any]]]) -> list[str]:
    """Where loops did not do the same work: first and last loss against the first loop's with the same model."""
    told: list[str] = []
    for keys in models_of(found):
        first = found[keys[0]][0]
        for key in keys[1:]:
            for name in ("first_loss", "last_loss"):
                value, expected = found[key][0][name], first[name]
                if not abs(value - expected) <= SAME_LOSS * abs(expected):
                    text = f"{name} {value:.8g}, {LOOPS[keys[0][0]]}, {keys[0][1]}: {expected:.8g}"
                    told.append(f"{LOOPS[key[0]]}, {key[1]}: {text}")
    return told


def show(found: dict[Key, list[dict[str, Any]]], missing: dict[Key, str]) -> None:
    """The table, and a line for each trace."""
    print(f"{'loop':<24} {'schedule':<16} {'step ms':>10} {'fastest':>10} {'us/action':>10}")
    for (loop, schedule), rows in found.items():
        step, fastest = median_of(rows, "step_s") * 1e3, min(row["min_s"] for row in rows) * 1e3
        action = median_of(rows, "us_per_action")
        print(f"{LOOPS[loop]:<24} {schedule:<16} {step:>10.3f} {fastest:>10.3f} {action:>10.1f}")
    for (loop, schedule), reason in missing.items():
        print(f"{LOOPS[loop]:<24} {schedule:<16} did not run: {reason}")
    for (_, schedule), rows in found.items():
        if rows and "simulated_s" in rows[0]:
            step, makespan, share, events, event = (
                median_of(rows, name)
                for name in ("step_over_simulated", "makespan_over_simulated", "trace_share", "events_per_step",
                             "event_s")
            )  # fmt: skip
            print(
                f"mpipipe, {schedule}: step {step:.3f}, pipeline {makespan:.3f} of the simulator's makespan with its "
                f"own costs; trace {events:.0f} events x {event * 1e9:.0f} ns = {share:.2%} of the step, "
                f"{share * median_of(rows, 'us_per_action'):.2f} us an action"
            )


def main() -> int:
    given = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by an exception, so that a launch ends with us
    try:
        cases = {schedule: make_case(given, schedule) for schedule in given.schedule}
    except (MpipipeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    found, missing = run_rounds(given, cases)
    show(found, missing)
    ratios, differences = ratios_of(found), other_losses(found)
    for name, values in ratios.items():
        print(f"{name}: {values['median']:.3f} ({values['min']:.3f} to {values['max']:.3f})")
    for difference in differences:
        print(f"not the same training: {difference}")
    result = {
        "model": given.model,
        "rounds": given.rounds,
        "environment": given.environment,
        "loops": [{"loop": loop, "schedule": schedule, "rounds": rows} for (loop, schedule), rows in found.items()],
        "missing": [{"loop": loop, "schedule": s, "reason": reason} for (loop, s), reason in missing.items()],
        "ratios": ratios,
        "different": differences,
    }
    print(json.dumps(result))
    return 1 if differences or any(key[0] == "ours" for key in missing) else 0


if __name__ == "__main__":
    sys.exit(main())
