#!/usr/bin/env python3
"""Who moves a long message while a rank computes: no one, a poll between layers, or a thread that polls.

    python tools/bench_progress.py                       every path of this MPI library, 1, 4 and 32 MiB
    python tools/bench_progress.py --paths tcp --mib 4 --layer-ms 5 20

Two ranks do 1F1B of four microbatches: a forward of eight layers of torch matmuls, a backward of twice that, a message
each way for each. Every path is a launch of its own; in it every way does a step in turn, round after round. Printed:
the median step of the plain way, and of each round the step of another way over the plain one's, the median over the
rounds. ``--small``: layers of many little operations, between which a thread must wait for Python's lock. The last
line is JSON. Compare within one run only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from bench_engine import mpi_launcher

ROOT = Path(__file__).resolve().parent.parent
PATHS = {
    "MPICH": {
        "default": {},
        "no-cma": {"MPIR_CVAR_CH4_CMA_ENABLE": "0"},
        "tcp": {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self"},
    },
    "Open MPI": {
        "default": {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"},
        "no-cma": {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm", "OMPI_MCA_smsc": "^cma"},
        "tcp": {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,tcp"},
    },
}
"""Variables of each way that bytes can take between two ranks of one machine."""

WAYS = ("plain", "poll", "thread")
MICROBATCHES = 4
LAYERS = 8
THREAD_NAP_S = 0.3e-3


# --- one rank ---


class Poller:
    """A thread that polls while ``open`` is above zero; every MPI call of the rank holds ``lock``."""

    def __init__(self, poll: Callable[[], None]) -> None:
        self.lock = threading.Lock()
        self.open = 0
        self._poll = poll
        self._ends = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends:
            time.sleep(THREAD_NAP_S)
            if self.open:
                with self.lock:
                    self._poll()

    def close(self) -> None:
        self._ends = True
        self._thread.join()


class Pipeline:
    """This rank's half of a step."""

    def __init__(self, transport: Any, nbytes: int, layer: Callable[[], object], way: str) -> None:
        import numpy as np

        self._transport = transport
        self._layer = layer
        self._polls = way == "poll"
        self._poller = Poller(transport.poll) if way == "thread" else None
        self._lock: Any = self._poller.lock if self._poller else nullcontext()
        self._in = [np.zeros(nbytes, np.uint8) for _ in range(MICROBATCHES)]
        self._out = [np.zeros(nbytes, np.uint8) for _ in range(MICROBATCHES)]

    def _compute(self, layers: int) -> None:
        for _ in range(layers):
            self._layer()
            if self._polls:
                self._transport.poll()

    def _wait(self, request: Any) -> None:
        while True:
            with self._lock:
                if request.test():
                    return
            os.sched_yield()

    def step(self) -> None:
        transport, peer = self._transport, 1 - self._transport.rank
        with self._lock:
            receives = [transport.irecv(memory, peer, k) for k, memory in enumerate(self._in)]
        if self._poller:
            self._poller.open = 1
        sends = []

        def send(k: int) -> None:
            with self._lock:
                sends.append(transport.isend(self._out[k], peer, k))

        if transport.rank == 0:
            for k in range(MICROBATCHES):
                self._compute(LAYERS)
                send(k)
                if k:
                    self._wait(receives[k - 1])
                    self._compute(2 * LAYERS)
            self._wait(receives[-1])
            self._compute(2 * LAYERS)
        else:
            for k in range(MICROBATCHES):
                self._wait(receives[k])
                self._compute(3 * LAYERS)
                send(k)
        for request in sends:
            self._wait(request)
        if self._poller:
            self._poller.open = 0

    def close(self) -> None:
        if self._poller:
            self._poller.close()


def make_layer(layer_s: float, small: bool) -> Callable[[], object]:
    """Matmuls that last ``layer_s`` together on this machine; with ``small`` of 24 x 24, else of 384 x 384."""
    import torch

    torch.set_num_threads(1)
    side = 24 if small else 384
    a, b, c = torch.randn(side, side), torch.randn(side, side), torch.empty(side, side)

    def run(count: int) -> float:
        start = time.thread_time()
        for _ in range(count):
            torch.mm(a, b, out=c)
        return time.thread_time() - start

    once = min(run(50) for _ in range(10)) / 50
    count = max(1, round(layer_s / once))
    return lambda: run(count)


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Every case of this launch, on both ranks; collective."""
    from mpipipe import collectives
    from mpipipe.transport import open_world

    transport = open_world()
    cases = []
    for layer_ms in given.layer_ms:
        layer = make_layer(layer_ms / 1e3, given.small)
        for mib in given.mib:
            ways = {way: Pipeline(transport, int(mib * 2**20), layer, way) for way in given.ways}
            steps: dict[str, list[float]] = {way: [] for way in ways}
            for turn in range(given.rounds + 1):
                for way, pipeline in ways.items():
                    collectives.barrier(transport)
                    start = time.perf_counter()
                    pipeline.step()
                    collectives.barrier(transport)
                    if turn:
                        steps[way].append(time.perf_counter() - start)
            for pipeline in ways.values():
                pipeline.close()
            cases.append({"layer_ms": layer_ms, "mib": mib, "steps": steps})
    if transport.rank == 0:
        print("\n" + json.dumps(cases), flush=True)
    transport.close()
    return cases


# --- the launches ---


def launch(path: str, variables: dict[str, str], launcher: list[str], timeout_s: float) -> list[dict[str, Any]]:
    """The cases of one launch; none, with a word on why, when it fails or does not end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [*launcher, "-n", "2", sys.executable, __file__, "--rank", *sys.argv[1:]]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as ranks:
        try:
            output, _ = ranks.communicate(timeout=timeout_s)
        except BaseException as stop:
            ranks.terminate()
            if not isinstance(stop, subprocess.TimeoutExpired):
                raise
            print(f"{path}: no end within {timeout_s:g} s (--timeout)")
            return []
    lines = [line for line in output.splitlines() if line.startswith("[{")]
    if ranks.returncode or not lines:
        print(f"{path}: exit code {ranks.returncode}\n{output[-2000:]}")
        return []
    cases: list[dict[str, Any]] = json.loads(lines[-1])
    return cases


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    paths = list(PATHS["MPICH"])
    parser.add_argument("--paths", nargs="+", choices=paths, default=paths)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--mib", nargs="+", type=float, default=[1, 4, 32], help="sizes of a message")
    parser.add_argument("--layer-ms", nargs="+", type=float, default=[5, 20], help="a poll comes after every layer")
    parser.add_argument("--small", action="store_true", help="layers of little operations")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one launch")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    given = parse_arguments()
    if given.rank:
        measure(given)
        return 0
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # by way of launch: it ends the ranks
    try:
        launcher, library = mpi_launcher()
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from None
    found = []
    print(f"{library}: {MICROBATCHES} microbatches of {LAYERS} layers, {given.rounds} rounds in turn")
    for path in given.paths:
        for case in launch(path, PATHS[library][path], launcher, given.timeout):
            steps = case.pop("steps")
            base = steps[given.ways[0]]
            ratios = {
                way: round(statistics.median(a / b for a, b in zip(steps[way], base, strict=True)), 3)
                for way in given.ways[1:]
            }
            case |= {"library": library, "path": path, "step_s": round(statistics.median(base), 4), "ratios": ratios}
            found.append(case)
            words = ", ".join(f"{way} {ratio:.2f}" for way, ratio in ratios.items())
            ideal = (MICROBATCHES + 1) * 3 * LAYERS * case["layer_ms"] / 1e3
            print(
                f"{path:8s} {case['mib']:4g} MiB, layers of {case['layer_ms']:g} ms: {given.ways[0]} step "
                f"{case['step_s'] * 1e3:.0f} ms (without messages {ideal * 1e3:.0f}); ratios: {words}",
                flush=True,
            )
    print(json.dumps(found))
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
