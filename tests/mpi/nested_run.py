"""Runs on every rank of an MPI launch: a model whose layers pass on a dict with a mask and document ids.

``mpirun -n P python tests/mpi/nested_run.py``. Every rank also trains it alone. Rank 0 prints one JSON line for each
schedule: {"schedule", "ok", "headers"}, the headers being those that rank 0 sent.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import little
import nested
import spying
import torch
from torch import nn

from mpipipe.collectives import all_gather_objects
from mpipipe.transport import Transport, open_world, solo

SCHEDULES = (("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2))
LENGTH, WIDTH = 40, nested.W
LAYERS = 6

torch.set_num_threads(1)


class Block(nn.Module):
    """Mixes positions of one document that are kept; ``first`` makes the side tensors, ``last`` returns one tensor."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.first, self.last = first, last

    def forward(self, v: dict[str, torch.Tensor]) -> Any:
        if self.first:
            ids = v["documents"]
            v = {
                **v,
                "mask": (ids[:, :, None] == ids[:, None, :]) & v["kept"][:, None, :],
                "scale": v["h"].mean(),
                "none": ids[:, :0],
            }
        mixed = v["mask"].float() @ self.linear(v["h"]) / LENGTH
        out = {**v, "h": v["h"] + mixed.tanh() + v.get("half", mixed).float(), "half": mixed.bfloat16()}
        return out["h"] * out["scale"] + out["documents"][..., None] if self.last else out


def layers() -> list[Any]:
    return [lambda k=k: Block(k == 0, k == LAYERS - 1) for k in range(LAYERS)]


def batches() -> list[Any]:
    found = []
    for step, rows in enumerate((5, 5, 3)):
        generator = torch.Generator().manual_seed(step)
        h, y = little.batch(step, rows, LENGTH, WIDTH)
        kept = torch.rand(rows, LENGTH, generator=generator) > 0.2
        documents = torch.randint(0, 3, (rows, LENGTH), generator=generator).cumsum(1) // 20
        found.append(({"h": h, "kept": kept, "documents": documents}, y))
    return found


def run(transport: Transport, schedule: str, chunks: int) -> little.Outcome:
    data = batches()
    config = nested.settings(schedule, chunks)
    return little.train(layers, config, transport, data, evaluate=lambda _: data[:1])


def main() -> int:
    transport = open_world()
    transport.configure(timeout_s=60.0, wait="auto")
    alone = run(solo(), "1f1b", 1)
    failed = False
    for schedule, chunks in SCHEDULES:
        spy = spying.Spy(transport)
        mine = run(spy, schedule, chunks)
        gathered = all_gather_objects(transport, [asdict(mine)["steps"], mine.evaluations])
        same = all(
            [steps, evaluations] == [[list(one) for one in alone.steps], alone.evaluations]
            for steps, evaluations in gathered
        )
        same = same and all(torch.equal(value, alone.parts[name]) for name, value in mine.parts.items())
        everyone = all(all_gather_objects(transport, same))
        failed = failed or not everyone
        if transport.rank == 0:
            print(json.dumps({"schedule": schedule, "ok": everyone, "headers": spy.headers}), flush=True)
    transport.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
