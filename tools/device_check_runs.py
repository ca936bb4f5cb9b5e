"""Checks of ``device_check.py`` that look into short runs: how long the GPU idles between two actions, by the run's own
trace, and whether memory is what the schedule's table says.

    mpirun -n P python tools/device_check_runs.py ranks PAYLOAD       a run whose trace is looked at; PAYLOAD: JSON
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from device_check_answers import Answers, Settings, answer, launch, left_s
from device_check_engine import config_of, make_batch, make_engine

MIB = 1 << 20
OVERLAP_US = 2.0
"""Two events, one behind the other, each told to half a microsecond."""


def case_of(device: str, small: bool, m: int = 8) -> dict[str, Any]:
    """A model of short actions: some milliseconds a forward of all layers."""
    if device == "cpu":
        model = {"layers": 6, "hidden": 32, "heads": 2, "vocab": 128, "sequence": 16}
    elif small:
        model = {"layers": 8, "hidden": 256, "heads": 4, "vocab": 4096, "sequence": 128}
    else:
        model = {"layers": 8, "hidden": 1024, "heads": 16, "vocab": 8192, "sequence": 1024}
    return {"model": model, "microbatch": 1, "m": m}


# --- idle time ---


def train(config: Any, transport: Any, device: str, steps: int) -> None:
    """With the trace on, into the config's folder."""
    trainer = make_engine(config, transport, device)
    batch = make_batch(config)
    for _ in range(steps):
        trainer.step(batch)
    trainer.close()


def idle_of(spans: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Of (begin, end) in nanoseconds, in any order: ``share``, of the time from the first begin to the last end, in
    which none of them goes on; ``median_us`` and ``count`` of these times; ``overlap_us``, the longest time by which
    one begins before all earlier ones have ended.
    """
    ordered = sorted(spans)
    first, end = ordered[0]
    gaps, idle, overlap = [], 0, 0
    for begin, stop in ordered[1:]:
        gaps.append(max(begin - end, 0))
        idle += gaps[-1]
        overlap = max(overlap, end - begin)
        end = max(end, stop)
    whole = end - first
    return {
        "share": idle / whole if whole else 0.0,
        "median_us": statistics.median(gaps) / 1e3 if gaps else 0.0,
        "overlap_us": overlap / 1e3,
        "count": float(len(gaps)),
        "whole_ms": whole / 1e6,
    }


def middle(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each figure over several steps."""
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def look_at_trace(folder: Path, warm: int) -> tuple[list[dict[str, float]], dict[str, float], set[bool]]:
    """Idle time of each rank, of all ranks together (medians over the steps after ``warm``), and whether the times are
    the device's.
    """
    from mpipipe.analysis import load_segment
    from mpipipe.formats.trace import COMPUTE_KINDS, FLAG_DEVICE_TIME

    segment = load_segment(folder)
    kinds = [int(kind) for kind in COMPUTE_KINDS]
    flags: set[bool] = set()
    each: dict[int, list[dict[str, float]]] = {rank: [] for rank in segment.ranks}
    together = []
    for step in segment.steps:
        if step <= warm:
            continue
        spans_of_all = []
        for rank, trace in segment.ranks.items():
            events = [event for event in trace.events_of(step) if int(event["kind"]) in kinds]
            spans = [(int(event["t0_ns"]), int(event["t1_ns"])) for event in events]
            flags |= {bool(int(event["flags"]) & FLAG_DEVICE_TIME) for event in events}
            each[rank].append(idle_of(spans))
            spans_of_all += spans
        together.append(idle_of(spans_of_all))
    return [middle(each[rank]) for rank in sorted(each)], middle(together), flags


def rank_main(payload: dict[str, Any]) -> None:
    from mpipipe.transport import open_world

    transport = open_world()
    config = config_of(payload["case"], payload["device"], payload["folder"])
    train(config, transport, payload["device"], payload["steps"])
    transport.close()


def check_idle(settings: Settings, answers: Answers) -> None:
    from mpipipe.transport import run_ranks, solo

    device, warm = settings["device"], 2
    steps = warm + (2 if device == "cpu" else 6)
    case = case_of(device, settings["small"])
    with tempfile.TemporaryDirectory(prefix="idle-") as temporary:
        for p in (1, 2):
            folder = str(Path(temporary) / f"p{p}")
            config = config_of(case, device, folder)
            how = "1 rank"
            if p == 1:
                train(config, solo(), device, steps)
            elif settings["launcher"] is None:
                how = f"{p} threads"
                run_ranks(p, lambda transport, config=config: train(config, transport, device, steps))
            else:
                how = f"{p} ranks over MPI"
                payload = json.dumps({"case": case, "device": device, "folder": folder, "steps": steps})
                said = launch(settings, p, [__file__, "ranks", payload], left_s(settings) - 6)
                if said.trouble():
                    answers.row(how, "wrong", said.trouble())
                    continue
            _tell_idle(answers, how, device, *look_at_trace(Path(folder), warm))


def _tell_idle(
    answers: Answers,
    how: str,
    device: str,
    each: list[dict[str, float]],
    together: dict[str, float],
    flags: set[bool],
) -> None:
    ranks = "; ".join(
        f"rank {rank} {100 * one['share']:.1f} % (median gap {one['median_us']:.1f} us, {one['count']:.0f} gaps)"
        for rank, one in enumerate(each)
    )
    text = f"between actions idle, of {together['whole_ms']:.2f} ms from first to last: {ranks}"
    if len(each) > 1:
        text += f"; no rank computes in {100 * together['share']:.1f} %"
    whose = "the device's" if flags == {True} else "the host's" if flags == {False} else "partly the device's"
    level = "ok"
    if device == "cuda" and flags != {True}:
        level, text = "wrong", f"{text}; the trace's times are not the device's"
    if device == "cuda" and max(one["overlap_us"] for one in each) > OVERLAP_US:
        level, text = "wrong", f"{text}; actions of one rank overlap, on one stream"
    answers.row(how, level, f"{text}; times are {whose}", ranks=each, together=together)


# --- memory ---


def foreseen(program: Any, message_bytes: int, limit_bytes: int) -> tuple[dict[int, int], int]:
    """(Receive buffers by their size, most microbatches live at once) of one rank's program."""
    from mpipipe.engine.window import buffers_needed
    from mpipipe.schedule import Kind

    live = peak = 0
    for op in program.ops:
        live += {Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(op.kind, 0)
        peak = max(peak, live)
    return buffers_needed(program, lambda *_: [message_bytes], limit_bytes), peak


def slots_of(device: Any) -> dict[str, int]:
    """Bytes in slots that the device has made so far; all are kept until the end of a run."""
    names = {"receive into": "_receive_slots", "send from": "_send_slots", "land in": "_landing_slots"}
    return {name: getattr(device, key).allocated_bytes for name, key in names.items() if hasattr(device, key)}


def _rank_memory(config: Any, transport: Any, device: str) -> dict[str, Any]:
    """Five steps of one rank; in the first, headers are sent, and its buffers are forgotten behind it."""
    from mpipipe.engine import compile_program

    trainer = make_engine(config, transport, device)
    engine, results = trainer._engine, []
    whole = engine.run

    def run(*given: Any) -> Any:
        results.append(whole(*given))
        return results[-1]

    engine.run = run
    batch = make_batch(config)
    trainer.step(batch)
    engine.mail.pool.drop_all()
    trainer.step(batch)
    after_two = slots_of(trainer.device)
    found = {size: len(free) for size, free in engine.mail.pool._free.items()}
    for _ in range(3):
        trainer.step(batch)
    model, comm = config.model, trainer.config.comm
    message_bytes = 4 * config.batch.microbatch * model.sequence * model.hidden
    needed, peak = foreseen(compile_program(trainer._table, transport.rank), message_bytes, comm.receive_ahead_bytes)
    outcome = {
        "buffers": found,
        "needed": needed,
        "live": results[-1].peak_live,
        "peak": peak,
        "slots": slots_of(trainer.device),
        "slots_after_two": after_two,
    }
    trainer.close()
    return outcome


def check_memory(settings: Settings, answers: Answers) -> None:
    from mpipipe.transport import run_ranks

    device = settings["device"]
    if device == "cuda":
        _peaks_by_microbatches(settings, answers)
    else:
        answers.row("peak memory", "absent", "needs a GPU")
    case = case_of(device, settings["small"])
    for p, schedule, chunks in ((2, "1f1b", 1), (4, "1f1b", 1), (2, "interleaved", 2), (2, "zb-v", 2), (2, "gpipe", 1)):
        name = f"{schedule}, {p} threads"
        if left_s(settings) < 4:
            answers.row(name, "absent", "no time was left for it")
            continue
        config = config_of(case, device, "unused", trace__enabled=False, pipeline__schedule=schedule,
                           pipeline__chunks=chunks)  # fmt: skip
        ranks = run_ranks(p, lambda transport, config=config: _rank_memory(config, transport, device))
        _tell_buffers(answers, name, ranks)


def _tell_buffers(answers: Answers, name: str, ranks: list[dict[str, Any]]) -> None:
    wrong = []
    for rank, one in enumerate(ranks):
        if one["buffers"] != one["needed"]:
            wrong.append(f"rank {rank} has receive buffers {one['buffers']}, by the table {one['needed']}")
        if one["live"] != one["peak"]:
            wrong.append(f"rank {rank} kept {one['live']} microbatches at once, by the table {one['peak']}")
    counts = [sum(one["buffers"].values()) for one in ranks]
    text = f"receive buffers {counts}, microbatches live {[one['live'] for one in ranks]}"
    if wrong:
        answers.row(name, "wrong", "; ".join(wrong), ranks=ranks)
        return
    text += ": as the table says"
    for kind in ranks[0]["slots"]:  # of a GPU; how many to send from is a matter of time
        each, before = ([one[key][kind] for one in ranks] for key in ("slots", "slots_after_two"))
        grown = f" ({[a - b for a, b in zip(each, before, strict=True)]} more than after two)" if each != before else ""
        text += f"; bytes to {kind} after five steps {each}{grown}"
    constant = all(one["slots"].get("receive into") == one["slots_after_two"].get("receive into") for one in ranks)
    answers.row(name, "ok" if constant else "missed", text, ranks=ranks)


def _peak_bytes(settings: Settings, schedule: str, m: int) -> tuple[int, int]:
    """(Allocated when idle, at its peak in a step) by torch at one rank with ``m`` microbatches."""
    import gc

    import torch

    from mpipipe.transport import solo

    config = config_of(case_of("cuda", settings["small"], m), "cuda", "unused", trace__enabled=False,
                       pipeline__schedule=schedule)  # fmt: skip
    trainer = make_engine(config, solo(), "cuda")
    batch = make_batch(config)
    for _ in range(2):
        trainer.step(batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    idle = torch.cuda.memory_allocated()
    trainer.step(batch)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    trainer.close()
    del trainer
    gc.collect()
    torch.cuda.empty_cache()
    return idle, peak


def _peaks_by_microbatches(settings: Settings, answers: Answers) -> None:
    """GPipe keeps m microbatches: its peak grows evenly with m, and 1F1B's at one rank, which keeps one, does not."""
    peaks = {m: _peak_bytes(settings, "gpipe", m)[1] for m in (2, 4, 8)}
    each = (peaks[4] - peaks[2]) / 2
    expected = peaks[4] + 4 * each
    off = abs(peaks[8] - expected) / expected
    flat = {m: _peak_bytes(settings, "1f1b", m)[1] for m in (2, 8)}
    grown = (flat[8] - flat[2]) / max(each, 1)
    shown = ", ".join(f"m = {m} {peak / MIB:.0f} MiB" for m, peak in peaks.items())
    text = (
        f"gpipe at one rank: {shown}: {each / MIB:.1f} MiB a microbatch, m = 8 is {100 * off:.2f} % off the line; 1f1b "
        f"{flat[2] / MIB:.0f} MiB with m = 2 and {flat[8] / MIB:.0f} MiB with m = 8: {grown:.2f} microbatches more"
    )
    level = "ok" if off < 0.02 and grown < 0.5 else "missed"
    answers.row("peak memory", level, text, gpipe=peaks, one_f_one_b=flat)


if __name__ == "__main__":
    if sys.argv[1] == "ranks":
        rank_main(json.loads(sys.argv[2]))
    else:
        answer({"idle": check_idle, "memory": check_memory})
