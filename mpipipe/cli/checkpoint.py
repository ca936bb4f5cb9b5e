"""``mpipipe checkpoint``: what a run folder keeps. Needs neither torch nor MPI."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mpipipe.cli.options import Json, RunDir, new_group
from mpipipe.cli.output import print_json, print_table
from mpipipe.errors import CheckpointNotFoundError
from mpipipe.units import format_bytes

if TYPE_CHECKING:
    from mpipipe.formats.checkpoint import Manifest

app = new_group("Checkpoints of a run.")


@app.command("list")
def list_all(run_dir: RunDir, as_json: Json = False) -> None:
    """List the checkpoints, and the folders that are none with the reason."""
    from mpipipe.formats.checkpoint import list_checkpoints, read_manifest
    from mpipipe.formats.paths import RunPaths

    _check_run_dir(run_dir)
    entries: list[dict[str, Any]] = []
    for found in list_checkpoints(RunPaths(run_dir).checkpoints):
        size = sum(read_manifest(found.path).files.values()) if found.problem is None else None
        entries.append(
            {"step": found.step, "path": str(found.path), "complete": found.problem is None, "bytes": size}
            | {"problem": found.problem}
        )
    if as_json:
        print_json({"run_dir": str(run_dir), "checkpoints": entries})
        return
    if not entries:
        print(f"no checkpoints in {RunPaths(run_dir).checkpoints}")
        return
    rows = [
        (
            entry["step"],
            "-" if entry["bytes"] is None else format_bytes(entry["bytes"]),
            entry["problem"] or entry["path"],
        )
        for entry in entries
    ]
    print_table(("step", "size", "path, or why it does not count"), rows)


@app.command()
def show(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="The run folder, or one checkpoint's folder.", show_default=False)
    ],
    step: Annotated[
        int | None, typer.Option("--step", help="Default: the newest complete one.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint holds: tensors with shape, type and file, scalars."""
    from mpipipe.formats.checkpoint import read_manifest

    folder = _folder_of(run_dir, step)
    manifest = read_manifest(folder)
    if as_json:
        print_json(_as_object(folder, manifest))
        return
    total = format_bytes(sum(manifest.files.values()))
    print(f"{folder}: step {manifest.step}, {len(manifest.tensors)} tensors in {len(manifest.files)} files, {total}")
    for name, value in manifest.scalars.items():
        print(f"{name} = {value}")
    rows = [
        (name, entry.dtype, "x".join(str(n) for n in entry.shape) or "scalar", entry.file)
        for name, entry in manifest.tensors.items()
    ]
    print_table(("tensor", "type", "shape", "file"), rows)
    for other, stored in manifest.aliases.items():
        print(f"{other} is {stored}")


def _as_object(folder: Path, manifest: Manifest) -> dict[str, Any]:
    tensors = {
        name: {"file": entry.file, "shape": list(entry.shape), "dtype": entry.dtype, "checksum": entry.checksum}
        for name, entry in manifest.tensors.items()
    }
    return {
        "path": str(folder),
        "step": manifest.step,
        "files": dict(manifest.files),
        "scalars": dict(manifest.scalars),
        "tensors": tensors,
        "aliases": dict(manifest.aliases),
    }


def _check_run_dir(run_dir: Path) -> None:
    if not run_dir.is_dir():
        raise CheckpointNotFoundError(f"{run_dir}: no such run folder")


def _folder_of(run_dir: Path, step: int | None) -> Path:
    """The folder of one checkpoint: ``run_dir`` itself, that of ``step``, or the newest complete one."""
    from mpipipe.formats.checkpoint import MANIFEST_NAME, list_checkpoints
    from mpipipe.formats.paths import RunPaths

    _check_run_dir(run_dir)
    if step is None and (run_dir / MANIFEST_NAME).exists():
        return run_dir
    paths = RunPaths(run_dir)
    if step is not None:
        return paths.checkpoint(step)
    complete = [found for found in list_checkpoints(paths.checkpoints) if found.problem is None]
    if not complete:
        raise CheckpointNotFoundError(f"no complete checkpoint in {paths.checkpoints}")
    return complete[-1].path
