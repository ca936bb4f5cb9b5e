#!/usr/bin/env python3
"""One rank of a launch of ``bench_sleeping.py``: mpipipe's trainer and a bare loop on stages that sleep.

    mpirun -n P python tools/bench_sleepers.py TOLD         TOLD: what ``bench_sleeping.launch`` says, as JSON

Rank 0 prints a line of JSON for each case.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from mpipipe.environment import available_cores
from mpipipe.schedule import Kind, ScheduleTable, build, simulate

NAP_S = 50e-6
WARM = 1  # steps before those that count


def run_rank(told: dict[str, Any]) -> int:
    """Every case in turn, all ranks together; rank 0 prints a line of JSON for each."""
    from mpipipe.transport import open_world

    transport = open_world()
    try:
        transport.configure(timeout_s=told["limit_s"], wait="auto")
        let_stages_sleep(told["forward_s"], told["backward_s"], told["values"])
        for number, case in enumerate(told["cases"]):
            row = run_case(told, case, transport, Path(told["folder"]) / f"run-{number}")
            if transport.rank == 0:
                print(json.dumps(row), flush=True)
        transport.close()
    except BaseException:
        traceback.print_exc()
        transport.abort(1)
    return 0


def run_case(told: dict[str, Any], case: dict[str, Any], transport: Any, folder: Path) -> dict[str, Any]:
    """The figures of one schedule. Collective."""
    from mpipipe.collectives import all_gather_objects, barrier

    table = build(case["schedule"], p=case["p"], m=case["m"], v=case["v"])
    loops: dict[str, Any] = {"ours": OurLoop(told, case, transport, folder)}
    if case["bare"]:
        loops["bare"] = BareLoop(told, table)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for _ in range(WARM + told["steps"]):
        for name, loop in loops.items():
            barrier(transport)
            begun, used = time.perf_counter(), time.process_time()
            loop.step()
            barrier(transport)
            times[name].append((time.perf_counter() - begun, time.process_time() - used))
    loops["ours"].close()
    ranks = all_gather_objects(transport, {name: found[WARM:] for name, found in times.items()})
    row = {key: case[key] for key in ("schedule", "p", "v", "m")}
    row["simulated_ms"] = case["simulated_s"] * 1e3
    for name, prefix in (("ours", ""), ("bare", "bare_")):
        if name in loops:
            walls = [wall for wall, _ in ranks[0][name]]
            cpu_s = sum(used for rank in ranks for _, used in rank[name])
            row[f"{prefix}step_ms"] = statistics.median(walls) * 1e3
            row[f"{prefix}excess"] = statistics.median(walls) / case["simulated_s"] - 1
            row[f"{prefix}core_share"] = cpu_s / (available_cores() * sum(walls))
    if "bare" in loops and row["bare_excess"] > 0:
        row["excess_over_bare"] = row["excess"] / row["bare_excess"]
    if transport.rank == 0:
        makespan_s, over_own_costs = traced_makespan(folder, table)
        row["pipeline_excess"] = makespan_s / case["simulated_s"] - 1
        row["excess_over_own_costs"] = over_own_costs - 1
    return row


def traced_makespan(folder: Path, table: ScheduleTable) -> tuple[float, float]:
    """Seconds from first start to last end of the pipeline over all ranks, and the ratio of that to the simulator's
    makespan with the mean cost that each stage's actions had in the same step; medians of the steps that count.
    """
    from mpipipe.analysis.load import load_segment
    from mpipipe.analysis.summary import measured_costs, step_bounds

    segment = load_segment(folder)
    lengths, ratios = [], []
    for step in segment.steps:
        if step > WARM:
            first, last = step_bounds(segment, step)
            lengths.append(last - first)
            ratios.append(lengths[-1] / simulate(table, measured_costs(segment, frozenset([step]))).makespan)
    return statistics.median(lengths) / 1e9, statistics.median(ratios)


EARLY_S = 0.12e-3
"""A sleep of milliseconds ends 0.07 to 0.11 ms late: the rest is waited for with the clock."""


def sleep_until(time_s: float) -> None:
    """Return at ``time_s`` (of ``time.perf_counter``)."""
    left = time_s - EARLY_S - time.perf_counter()
    if left > 0.0:
        time.sleep(left)
    while time.perf_counter() < time_s:
        pass


def let_stages_sleep(forward_s: float, backward_s: float, values: int) -> None:
    """From here on in this process: a stage computes nothing. Its forward sleeps ``forward_s``, its whole backward
    ``backward_s``, each half of a split one half of that; outputs and gradients have ``values`` zeros.
    """
    import torch

    from mpipipe.stage import Activation, Gradients, Stage

    made = torch.zeros(1, values)

    def sleeping(seconds: float, found: Any) -> Any:
        def sleep(stage: Any, *arguments: Any) -> Any:
            sleep_until(time.perf_counter() + seconds)
            return found(stage)

        return sleep

    def gradients(stage: Any) -> Gradients:
        return [made] if stage.index else []

    replaced: Any = Stage
    replaced.forward = sleeping(forward_s, lambda stage: Activation((made,), (True,)))
    replaced.loss = lambda stage, *arguments, keep: (made[0, 0], values)
    replaced.backward = sleeping(backward_s, gradients)
    replaced.backward_input = sleeping(backward_s / 2, gradients)
    replaced.backward_weight = sleeping(backward_s / 2, lambda stage: None)


class OurLoop:
    """mpipipe's trainer on stages that sleep, with one trainable number each."""

    def __init__(self, told: dict[str, Any], case: dict[str, Any], transport: Any, folder: Path) -> None:
        import torch

        from mpipipe import Config
        from mpipipe.trainer import Trainer

        def loss_fn(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
            return (output * target).sum(), target.numel()

        config = Config.from_tables(
            {
                "run": {"dir": str(folder)},
                "batch": {"sequences": case["m"], "microbatch": 1},
                "pipeline": {"schedule": case["schedule"], "chunks": case["v"], "partition": "even"},
                "comm": {"timeout_s": told["limit_s"]},
            }
        )
        layers = [partial(torch.nn.Linear, 1, 1, bias=False)] * (case["p"] * case["v"])
        self._trainer = Trainer(config, layers, loss_fn, transport=transport)
        self._batch = (torch.ones(case["m"], told["values"]), torch.ones(case["m"], told["values"]))

    def step(self) -> None:
        self._trainer.step(self._batch)

    def close(self) -> None:
        self._trainer.close()


class BareLoop:
    """The rows of a table with plain MPI calls, receives posted one ahead; it computes nothing and only sleeps."""

    def __init__(self, told: dict[str, Any], table: ScheduleTable) -> None:
        import numpy as np
        from mpi4py import MPI  # begun by the transport

        self._comm, place, self._last = MPI.COMM_WORLD.Dup(), table.placement, table.num_stages - 1
        rank, half_s = self._comm.rank, told["backward_s"] / 2
        self._sleeps = {Kind.F: told["forward_s"], Kind.B: 2 * half_s, Kind.I: half_s, Kind.W: half_s}
        self._out = np.zeros(told["values"], np.float32)
        self._into: dict[int, Any] = {}
        self._lanes: dict[tuple[bool, int], list[int]] = {}
        self._work: list[tuple[tuple[bool, int] | None, Any, tuple[int, int] | None]] = []
        for action in table.actions(rank):
            stage, forward, step = action.stage, action.kind == Kind.F, 1 if action.kind == Kind.F else -1
            lane = target = None
            if action.kind != Kind.W and 0 <= stage - step <= self._last and place[stage - step] != rank:
                lane, tag = (forward, stage), (stage * table.m + action.microbatch) * 2 + forward
                self._lanes.setdefault(lane, []).append(tag)
                self._into[tag] = np.zeros(told["values"], np.float32)
            if action.kind != Kind.W and 0 <= stage + step <= self._last and place[stage + step] != rank:
                target = (place[stage + step], ((stage + step) * table.m + action.microbatch) * 2 + forward)
            self._work.append((lane, action, target))
        self._sources = {lane: place[lane[1] - (1 if lane[0] else -1)] for lane in self._lanes}

    def _post(self, lane: tuple[bool, int]) -> Any:
        """The lane's next receive, None at its end."""
        tag = next(self._left[lane], None)
        return None if tag is None else self._comm.Irecv(self._into[tag], self._sources[lane], tag)

    def step(self) -> None:
        self._left = {lane: iter(tags) for lane, tags in self._lanes.items()}
        posted = {lane: self._post(lane) for lane in self._lanes}
        sends = []
        for lane, action, target in self._work:
            if lane is not None:
                self._wait(posted[lane])
                posted[lane] = self._post(lane)
            sleep_until(time.perf_counter() + self._sleeps[Kind(action.kind)])
            if target is not None:
                sends.append(self._comm.Isend(self._out, *target))
        for request in sends:
            self._wait(request)

    def _wait(self, request: Any) -> None:
        while not request.Test():
            time.sleep(NAP_S)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(run_rank(json.loads(sys.argv[1])))
