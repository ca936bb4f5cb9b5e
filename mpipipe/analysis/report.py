"""A report of a launch: the picture of one step and the figures as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mpipipe.analysis.load import Segment, load_segment
from mpipipe.analysis.segments import segment_text
from mpipipe.analysis.spacetime import draw_spacetime
from mpipipe.analysis.summary import averaged_steps, summary
from mpipipe.errors import TraceFormatError
from mpipipe.formats.paths import picture_in

_HEADS = {
    "wait_activation_s": "waiting for an activation",
    "wait_gradient_s": "waiting for a gradient",
    "loss_s": "waiting for the others at the step's end",
    "send_post_s": "starting sends",
    "send_wait_s": "waiting for sends",
    "other_s": "no action recorded",
}


def report(
    run: str | Path | Segment,
    out_dir: str | Path,
    step: int | None = None,
    *,
    segment: int | None = None,
    allow_uncalibrated: bool = False,
) -> list[Path]:
    """Write ``spacetime-step-00000012.png``, ``summary.md`` and ``summary.json`` into ``out_dir``; the files, in this
    order.

    ``step`` defaults to the averaged step whose makespan is the median (of an even number the shorter of the middle
    two). Raises ConfigError where the step asked for is not whole, TraceFormatError where none is, and as
    :func:`load_segment`.
    """
    loaded = run if isinstance(run, Segment) else load_segment(run, segment, allow_uncalibrated=allow_uncalibrated)
    if step is not None:
        loaded.require_step(step)
    figures = summary(loaded)
    why = "asked for"
    if step is None:
        step, why = _median_step(loaded, figures), "the step of median duration"
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    picture = picture_in(folder, step)
    draw_spacetime(loaded, step, picture, note=f"{why}; {_mean_text(figures)}")
    text, data = folder / "summary.md", folder / "summary.json"
    text.write_text(summary_text(figures) + f"\nPicture of step {step} ({why}): `{picture.name}`\n", encoding="utf-8")
    data.write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return [picture, text, data]


def _median_step(loaded: Segment, figures: dict[str, Any]) -> int:
    steps = averaged_steps(loaded)[1]
    ordered = sorted((each["makespan_s"], each["step"]) for each in figures["per_step"] if each["step"] in steps)
    if not ordered:
        reasons = "; ".join(f"step {at}: {why}" for at, why in list(loaded.left_out.items())[:12]) or "none was begun"
        raise TraceFormatError(f"{loaded.path}: no step is complete on all ranks ({reasons})")
    return int(ordered[(len(ordered) - 1) // 2][1])


def _mean_text(figures: dict[str, Any]) -> str:
    """``mean of 449 steps: 303.3 ms, bubble fraction 0.388``."""
    mean, count = figures["mean"], figures["steps_averaged"]
    of = "the only step" if count == 1 else f"mean of {count} steps"
    return f"{of}: {mean['makespan_s'] * 1e3:.4g} ms, bubble fraction {mean['bubble_fraction']:.3f}"


def summary_text(figures: dict[str, Any]) -> str:
    """The dict of :func:`summary` as Markdown."""
    messages, warmup = figures["messages"], figures["warmup_step"]
    names = ", ".join(f"{each['name']} (m={each['m']})" for each in figures["schedules"].values()) or "no table"
    mean = figures["mean"]
    numbers = [each["segment"] for each in figures["segments"]]
    lines = [
        f"# Trace of {figures['path']}",
        "",
        segment_text(figures["segment"], numbers, len(figures["ranks"]), figures["world_size"]),
        "",
        f"p={figures['p']} v={figures['v']} d={figures['d']}, schedule {names}, "
        f"{figures['steps_averaged']} steps averaged"
        + (f" (warm-up step {warmup} left out)" if warmup is not None else ""),
        "",
        "| mean of a step | |",
        "|---|---|",
        f"| bubble fraction, measured | {_fraction(mean['bubble_fraction'])} |",
        f"| bubble fraction, simulated with measured costs | {_number(mean['bubble_fraction_simulated'])} |",
        f"| bubble fraction, simulated with equal costs | {_number(mean['bubble_fraction_simulated_uniform'])} |",
        f"| pipeline makespan, ms | {_milliseconds(mean['makespan_s'])} |",
        f"| whole step, ms | {_milliseconds(mean['step_s'])} |",
        f"| messages (expected) | {messages['count_per_step']:g} ({messages['expected_per_step']:g}) |",
        f"| bytes sent | {messages['bytes_per_step']:.0f} |",
        "",
        *_rank_table(figures["per_rank"]),
        "",
        *_stage_table(figures["per_stage"]),
    ]
    notes = [f"- step {each['step']} left out: {each['reason']}" for each in figures["steps_left_out"]]
    notes += [f"- {warning}" for warning in figures["warnings"]]
    if notes:
        lines += ["", "## Remarks", "", *notes]
    return "\n".join(lines) + "\n"


def _rank_table(ranks: list[dict[str, Any]]) -> list[str]:
    always = ("busy_s", "wait_activation_s", "wait_gradient_s", "send_wait_s", "optimizer_s", "loss_s")
    columns = [key for key in ranks[0] if key in always or (key != "rank" and any(each[key] for each in ranks))]
    heads = [_HEADS.get(key, key.removesuffix("_s").replace("_", " ")) for key in columns]
    lines = ["## Where each rank's time went (ms a step)", "", f"| rank | {' | '.join(heads)} |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for each in ranks:
        lines.append(f"| {each['rank']} | {' | '.join(_milliseconds(each[key]) for key in columns)} |")
    return lines


def _stage_table(stages: list[dict[str, Any]]) -> list[str]:
    lines = ["## What each stage costs (ms)", ""]
    lines += ["| stage | kind | count | mean | p50 | p95 |", "|---|---|---|---|---|---|"]
    for each in stages:
        for kind, figures in each.items():
            if kind != "stage":
                times = " | ".join(_milliseconds(figures[key]) for key in ("mean_s", "p50_s", "p95_s"))
                lines.append(f"| {each['stage']} | {kind} | {figures['count']} | {times} |")
    return lines


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _fraction(value: float | None) -> str:
    """``0.388 (38.8 %)``."""
    return "-" if value is None else f"{value:.3f} ({100 * value:.1f} %)"
