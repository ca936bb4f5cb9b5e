"""``mpipipe generate``: text from a checkpoint, in one process. Needs torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from mpipipe.cli.options import Json, RunDir
from mpipipe.cli.output import print_json
from mpipipe.errors import MissingDependencyError


def add_to(app: typer.Typer) -> None:
    """Put the verb into the tree."""
    app.command()(generate)


def generate(
    run_dir: RunDir,
    prompt: Annotated[
        str, typer.Option("--prompt", metavar="TEXT", help="The text to go on from.", show_default=False)
    ],
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens to add.", min=1)] = 128,
    step: Annotated[
        int | None, typer.Option("--step", help="Default: the newest complete checkpoint.", show_default=False)
    ] = None,
    temperature: Annotated[
        float,
        typer.Option("--temperature", metavar="T", help="0: always the most probable token; above 0: drawn, 1 as is."),
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of the draws: the same seed, the same text.")] = 0,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="FILE",
            help="A tokenizer's JSON file or a token file. Default: that of the run's training tokens.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Continue a text with a run's checkpoint.

    In one process, whatever number of ranks it was saved at.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("generate needs torch, which is not installed: pip install 'mpipipe[train]'")
    from mpipipe.generate import generate as run

    text = run(run_dir, prompt, max_tokens, step, temperature=temperature, seed=seed, tokenizer=tokenizer)
    if as_json:
        print_json({"prompt": prompt, "text": text})
    else:
        print(prompt + text)
