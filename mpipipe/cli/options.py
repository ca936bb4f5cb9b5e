"""Arguments and options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.", show_default=False)]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run folder.", show_default=False)]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="A setting in place of the run file's; repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to this file.", show_default=False)
]


def new_group(text: str) -> typer.Typer:
    """A group of verbs with its help text."""
    return typer.Typer(no_args_is_help=True, help=text, rich_markup_mode=None)
