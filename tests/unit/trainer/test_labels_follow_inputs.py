"""B14: input and label of one sample stay together, with shuffling, over epochs and a resume, at four ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tiny

from mpipipe.formats.tokens import write_tokens
from mpipipe.trainer import train_run
from mpipipe.transport import Transport, run_ranks

NEXT_TOKENS = 29


def test_the_loss_falls_to_zero_where_the_next_token_is_certain(tmp_path: Path) -> None:
    """Token k is always followed by 3k + 1 mod 29; chance is ln 29 = 3.37. A label of another sample would keep the
    loss there."""
    tokens = [5]
    while len(tokens) < 24 * tiny.SEQUENCE + 1:
        tokens.append((3 * tokens[-1] + 1) % NEXT_TOKENS)
    write_tokens(tmp_path / "train.h5", [np.array(tokens, dtype=np.uint8)], NEXT_TOKENS, "none", [])
    losses: list[float] = []

    def run(p: int, steps: int) -> None:
        config = tiny.config(
            sequences=8,
            microbatch=2,
            run_dir=str(tmp_path / "run"),
            run__steps=steps,
            model__layers=4,
            model__hidden=32,
            model__vocab=NEXT_TOKENS,
            model__dropout=0.0,
            data__train=[str(tmp_path / "train.h5")],
            optimizer__lr=2e-2,
            optimizer__clip_norm=1.0,
            lr__schedule="constant",
            trace__enabled=False,
        )

        def work(transport: Transport) -> None:
            def report(line: dict[str, object]) -> None:
                if line["event"] == "step" and transport.rank == 0:
                    losses.append(line["loss"])  # type: ignore[arg-type]

            train_run(config, transport, report=report)

        run_ranks(p, work)

    run(4, 30)
    run(2, 60)
    assert len(losses) == 60
    assert losses[0] > 3.0
    assert losses[-1] < 0.1
