#!/usr/bin/env python3
"""One training loop of ``bench_engine.py``, run by every rank of a launch: mpipipe's trainer or one of its two peers.

    mpirun -n P python tools/bench_peers.py {ours|bare} CASE         CASE: the fields of ``bench_layers.Case`` as JSON
    python -m torch.distributed.run --nproc-per-node P tools/bench_peers.py torch CASE

All three train the same layers with the same weights on the same batch, so their losses agree. A step is timed from
barrier to barrier, the optimizer (fused AdamW, no clipping) counted. The owner of the last stage prints one line of
JSON. One thread a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from bench_layers import Case, loss_of, make_batch, make_layer, make_stage

from mpipipe.schedule import Kind, build

ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Unavailable(Exception):
    """This loop can't run the case."""


# --- the bare loop: mpi4py and torch, and nothing else ---


class Lane:
    """Receives of one kind for one stage, in the order of the schedule; the next one is always posted."""

    def __init__(self, comm: Any, peer: int, tag: int, shape: tuple[int, ...], total: int, depth: int) -> None:
        self._comm, self._peer, self._tag, self._total = comm, peer, tag, total
        self._buffers = [torch.empty(shape) for _ in range(depth)]
        self._arrays = [buffer.numpy() for buffer in self._buffers]

    def begin(self) -> None:
        """A new step."""
        self._posted = 0
        self._post()

    def _post(self) -> None:
        if self._posted < self._total:
            array = self._arrays[self._posted % len(self._arrays)]
            self._request = self._comm.Irecv(array, self._peer, self._tag)
            self._posted += 1

    def take(self) -> torch.Tensor:
        """Wait for the oldest message; its tensor is valid until ``depth - 1`` more were taken."""
        self._request.Wait()
        taken = self._buffers[(self._posted - 1) % len(self._buffers)]
        self._post()
        return taken


def peak_live(actions: list[Any], stage: int) -> int:
    """Most microbatches of ``stage`` that are between their forward and their backward at once."""
    live = peak = 0
    for action in actions:
        if action.stage == stage:
            live += 1 if action.kind == Kind.F else -1
            peak = max(peak, live)
    return peak


class BareLoop:
    """The rows of a schedule's table with direct MPI calls, receives posted one ahead and sends that do not block."""

    def __init__(self, case: Case) -> None:
        import mpi4py

        mpi4py.rc.thread_level = "serialized"
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        table = build(case.schedule, p=case.p, m=case.m, v=case.v)
        actions = table.actions(self._comm.rank)
        if any(action.kind not in (Kind.F, Kind.B) for action in actions) or table.mirror is not None:
            raise Unavailable(f"the bare loop knows F and B only, {case.schedule} has more")
        self._placement, self._last = table.placement, table.num_stages - 1
        self.owns_last = table.placement[-1] == self._comm.rank
        self._stages = {s: make_stage(case, s) for s, r in enumerate(table.placement) if r == self._comm.rank}
        self._actions = [(action.kind == Kind.F, action.stage, action.microbatch) for action in actions]
        self._loss_fn, self._m = loss_of(case, "mean"), case.m
        x, y = make_batch(case)
        self._inputs, self._targets = x.split(case.microbatch), y.split(case.microbatch)
        parameters = [parameter for stage in self._stages.values() for parameter in stage.parameters()]
        self._optimizer = torch.optim.AdamW(parameters, fused=True, **ADAMW)
        self._lanes: dict[tuple[bool, int], Lane] = {}
        width = case.sizes["hidden" if case.model == "gpt" else "width"]
        shape = (1, case.sizes["sequence"], width) if case.model == "gpt" else (case.microbatch, width)
        for stage in self._stages:
            for forward, other in ((True, stage - 1), (False, stage + 1)):
                if 0 <= other <= self._last and table.placement[other] != self._comm.rank:
                    depth = 1 + (peak_live(actions, stage) if forward else 1)
                    tag = 2 * stage + forward
                    self._lanes[(forward, stage)] = Lane(
                        self._comm, table.placement[other], tag, shape, case.m, min(case.m, depth)
                    )
        self.barrier = self._comm.Barrier

    def step(self) -> float:
        """One step; the mean loss on the owner of the last stage."""
        self._kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._here: dict[tuple[bool, int, int], torch.Tensor] = {}  # from a stage of this rank
        self._losses: list[torch.Tensor] = []
        self._sends: deque[tuple[Any, torch.Tensor]] = deque()
        for lane in self._lanes.values():
            lane.begin()
        for forward, stage, k in self._actions:
            if forward:
                self._forward(stage, k)
            else:
                self._backward(stage, k)
        self._mpi.Request.Waitall([request for request, _ in self._sends])
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return sum(float(loss) for loss in self._losses)

    def _forward(self, stage: int, k: int) -> None:
        if stage == 0:
            leaf = self._inputs[k]
        else:
            lane = self._lanes.get((True, stage))
            value = self._here.pop((True, stage, k)) if lane is None else lane.take()
            leaf = value.detach().requires_grad_()
        output = self._stages[stage](leaf)
        if stage == self._last:
            output = self._loss_fn(output, self._targets[k]) / self._m
            self._losses.append(output.detach())
        else:
            self._pass(True, stage + 1, k, output.detach())
        self._kept[(stage, k)] = (leaf, output)

    def _backward(self, stage: int, k: int) -> None:
        gradient = None
        if stage != self._last:
            lane = self._lanes.get((False, stage))
            gradient = self._here.pop((False, stage, k)) if lane is None else lane.take()
        leaf, output = self._kept.pop((stage, k))
        torch.autograd.backward(output, gradient)
        if stage:
            assert leaf.grad is not None
            self._pass(False, stage - 1, k, leaf.grad)

    def _pass(self, forward: bool, stage: int, k: int, tensor: torch.Tensor) -> None:
        peer = self._placement[stage]
        if peer == self._comm.rank:
            self._here[(forward, stage, k)] = tensor
            return
        tensor = tensor.contiguous()
        self._sends.append((self._comm.Isend(tensor.numpy(), peer, 2 * stage + forward), tensor))
        while len(self._sends) > 2 and self._sends[0][0].Test():
            self._sends.popleft()


# --- torch.distributed.pipelining over gloo ---

TORCH_SCHEDULES = {
    "gpipe": ("ScheduleGPipe", 1),
    "1f1b": ("Schedule1F1B", 1),
    "interleaved": ("ScheduleInterleaved1F1B", 0),
    "looped-bfs": ("ScheduleLoopedBFS", 0),
    "interleaved-zb": ("ScheduleInterleavedZeroBubble", 0),
    "zb-v": ("ScheduleZBVZeroBubble", 2),
    "dualpipe-v": ("ScheduleDualPipeV", 2),
}
"""Class of torch's schedule, and its stages a rank; 0: any number."""


class TorchLoop:
    """Torch's own pipeline runtime."""

    def __init__(self, case: Case) -> None:
        name, stages = TORCH_SCHEDULES.get(case.schedule, ("", 0))
        if not name or (stages and stages != case.v):
            raise Unavailable(f"torch.distributed.pipelining has no {case.schedule} with {case.v} stages a rank")
        import torch.distributed as dist
        from torch.distributed.pipelining import PipelineStage, schedules

        dist.init_process_group("gloo")
        self._dist, rank = dist, dist.get_rank()
        count = case.p * case.v
        mine = [rank, count - 1 - rank] if name.endswith(("ZBVZeroBubble", "PipeV")) else range(rank, count, case.p)
        self.owns_last, self._owns_first = count - 1 in mine, 0 in mine
        modules = [make_stage(case, stage) for stage in mine]
        self._x, self._y = make_batch(case)
        self._optimizers = [torch.optim.AdamW(module.parameters(), fused=True, **ADAMW) for module in modules]
        parts = [
            PipelineStage(module, stage, count, torch.device("cpu"))
            for module, stage in zip(modules, mine, strict=True)
        ]
        single = issubclass(getattr(schedules, name), schedules.PipelineScheduleSingle)
        self._schedule = getattr(schedules, name)(parts[0] if single else parts, case.m, loss_fn=loss_of(case, "mean"))
        self.barrier = dist.barrier

    def step(self) -> float:
        losses: list[torch.Tensor] = []
        inputs = (self._x,) if self._owns_first else ()
        self._schedule.step(*inputs, **({"target": self._y, "losses": losses} if self.owns_last else {}))
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return sum(loss.item() for loss in losses) / max(len(losses), 1)

    def close(self) -> None:
        self._dist.destroy_process_group()


# --- mpipipe ---


class OurLoop:
    """mpipipe's trainer over MPI."""

    def __init__(self, case: Case) -> None:
        from mpipipe import Config
        from mpipipe.trainer import Trainer

        optimizer = {key: list(value) if isinstance(value, tuple) else value for key, value in ADAMW.items()}
        config = Config.from_tables(
            {
                "run": {"dir": case.folder, "steps": case.warm + case.steps},
                "batch": {"sequences": case.m * case.microbatch, "microbatch": case.microbatch},
                "pipeline": {"schedule": case.schedule, "chunks": case.v, "partition": list(case.layers)},
                "optimizer": {**optimizer, "decay": "all"},
                "trace": {"enabled": case.trace},
            }
        )
        of_microbatch = loss_of(case, "sum")

        def loss_fn(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
            return of_microbatch(output, target), target.numel()

        layers = [lambda index=index: make_layer(case, index) for index in range(sum(case.layers))]
        self._trainer = Trainer(config, layers, loss_fn)
        self._batch = make_batch(case)
        from mpi4py import MPI  # begun by the trainer

        self.owns_last = self._trainer.model.placement[-1] == MPI.COMM_WORLD.rank
        self.barrier = MPI.COMM_WORLD.Barrier

    def step(self) -> float:
        return self._trainer.step(self._batch)

    def close(self) -> None:
        self._trainer.close()


LOOPS: dict[str, Callable[[Case], Any]] = {"ours": OurLoop, "bare": BareLoop, "torch": TorchLoop}


def measure(loop: Any, case: Case) -> dict[str, Any]:
    """Times of ``case.steps`` steps after ``case.warm`` others, and the losses of the first and the last."""
    times, losses = [], []
    for _ in range(case.warm + case.steps):
        loop.barrier()
        begun = time.perf_counter()
        losses.append(loop.step())
        loop.barrier()
        times.append(time.perf_counter() - begun)
    kept = times[case.warm :]
    step_s = statistics.median(kept)
    return {
        "step_s": step_s,
        "min_s": min(kept),
        "max_s": max(kept),
        "us_per_action": step_s * 1e6 / (2 * case.m * case.v),
        "first_step_s": times[0],
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="One rank of one training loop.")
    parser.add_argument("loop", choices=LOOPS)
    parser.add_argument("case", help="JSON")
    arguments = parser.parse_args()
    given = json.loads(arguments.case)
    case = Case(**{**given, "layers": tuple(given["layers"])})
    torch.set_num_threads(1)
    try:
        loop = LOOPS[arguments.loop](case)
    except Unavailable as reason:
        print(json.dumps({"bench": arguments.loop, "schedule": case.schedule, "unavailable": str(reason)}), flush=True)
        return 0  # a launcher would call any other code a crash
    figures = measure(loop, case)
    if loop.owns_last:
        about = {key: value for key, value in asdict(case).items() if key not in ("folder", "sizes")}
        print(json.dumps({"bench": arguments.loop, **about, **figures}), flush=True)
    if hasattr(loop, "close"):
        loop.close()
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
