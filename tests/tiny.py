"""A tiny GPT and runs of it, shared by the tests in this process and by those that launch MPI ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from mpipipe.config import Config
from mpipipe.errors import ScheduleError
from mpipipe.model import gpt2_layers, token_loss
from mpipipe.schedule import build
from mpipipe.trainer import Trainer
from mpipipe.transport import Transport

VOCAB, SEQUENCE = 101, 8

SCHEDULES = (
    ("naive", 1), ("gpipe", 1), ("1f1b", 1), ("1f1b:warmup=1", 1), ("eager-1f1b", 1), ("interleaved", 2),
    ("interleaved", 3), ("looped-bfs", 2), ("zb-h1", 1), ("zb-h2", 1), ("interleaved-zb", 2), ("interleaved-zb", 3),
    ("zb-v", 2), ("v-half", 2), ("v-min", 2), ("dualpipe-v", 2), ("hanayo", 2),
)  # fmt: skip
"""(schedule, chunks) of the grids: every schedule that keeps one copy of each stage."""


def takes(schedule: str, chunks: int, num_ranks: int, num_microbatches: int) -> bool:
    """Whether there is a table of these numbers."""
    try:
        build(schedule, p=num_ranks, v=chunks, m=num_microbatches)
    except ScheduleError:
        return False
    return True


def config(
    *,
    schedule: str = "1f1b",
    chunks: int = 1,
    sequences: int = 8,
    microbatch: int = 2,
    run_dir: str | None = None,
    **keys: Any,
) -> Config:
    """A run of a 12-layer GPT of width 16. Further settings as ``section__key=value``."""
    tables: dict[str, dict[str, object]] = {
        "run": {"seed": 3, "steps": 20, "dir": run_dir or "unused"},
        "model": {
            "layers": 12,
            "hidden": 16,
            "heads": 2,
            "vocab": VOCAB,
            "sequence": SEQUENCE,
            "dropout": 0.1,
            "tie_embeddings": True,
        },
        "batch": {"sequences": sequences, "microbatch": microbatch},
        "pipeline": {"schedule": schedule, "chunks": chunks},
        "optimizer": {"lr": 1e-3, "clip_norm": 0.3},
        "lr": {"schedule": "cosine", "warmup_steps": 2},
        "trace": {"enabled": run_dir is not None},
    }
    for name, value in keys.items():
        section, key = name.split("__")
        tables.setdefault(section, {})[key] = value
    return Config.from_tables(tables)


def batch(step: int, sequences: int = 8, sequence: int = SEQUENCE) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and the next ones, a function of the step."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCAB, (sequences, sequence + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def batches(config: Config, first: int, last: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for step in range(first, last):
        yield batch(step, config.batch.sequences)


def trainer(config: Config, transport: Transport) -> Trainer:
    layers = gpt2_layers(config.model, config.run.seed)
    return Trainer(
        config,
        layers.factories,
        token_loss,
        tied=layers.tied,
        names=layers.names,
        descriptions=layers.descriptions,
        transport=transport,
    )


def digests(trainer: Trainer) -> dict[str, str]:
    """A checksum of every parameter and moment that this rank holds."""
    found = {}
    for name, parameter in trainer.model.parameters.items():
        for kind, tensor in zip(
            ("value", "exp_avg", "exp_avg_sq"), (parameter, *trainer.optimizer.moments(name)), strict=True
        ):
            found[f"{kind} {name}"] = hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()[:16]
    return found


@dataclass
class Story:
    """What a run did: (loss, gradient norm) of every step on this rank, and the digests of its state after the last."""

    steps: list[tuple[float | None, float]] = field(default_factory=list)
    state: dict[str, str] = field(default_factory=dict)
    peak_live: int = 0


def run(config: Config, transport: Transport, steps: int = 3) -> Story:
    """Train ``steps`` steps from the start."""
    made = trainer(config, transport)
    story = Story()
    for data in batches(config, 0, steps):
        report = made.step_report(data)
        story.steps.append((report.loss, report.grad_norm))
    story.state = digests(made)
    made.close()
    return story


def merge(stories: list[Story]) -> Story:
    """The ranks' stories as one. Ranks that hold the same weight, or that report a step, must agree bit for bit."""
    whole = Story(stories[0].steps)
    for story in stories:
        assert story.steps == whole.steps
        for name, digest in story.state.items():
            assert whole.state.setdefault(name, digest) == digest, f"two ranks hold different copies of {name}"
    return whole
