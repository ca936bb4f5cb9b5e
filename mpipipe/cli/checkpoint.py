"""``mpipipe checkpoint``: what a run folder keeps. Needs neither torch nor MPI."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mpipipe.cli.options import Json, RunDir, new_group
from mpipipe.cli.output import print_json, print_table
from mpipipe.errors import CheckpointNotFoundError
from mpipipe.units import counted, format_bytes

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
    everything: Annotated[bool, typer.Option("--all", help="All tensors, with the file that each is in.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint holds: parameters with type and shape, scalars, how much else."""
    from mpipipe.formats.checkpoint import PARAMETERS, read_manifest

    folder = _folder_of(run_dir, step)
    manifest = read_manifest(folder)
    if as_json:
        print_json(_as_object(folder, manifest))
        return
    total = format_bytes(sum(manifest.files.values()))
    where = f"{counted(len(manifest.tensors), 'tensor')} in {counted(len(manifest.files), 'file')}, {total}"
    print(f"{folder}: step {manifest.step}, {where}")
    for name, value in manifest.scalars.items():
        print(f"{name} = {value}")
    rows = {
        name: (name, entry.dtype, "x".join(str(n) for n in entry.shape) or "scalar", entry.file)
        for name, entry in manifest.tensors.items()
    }
    if everything:
        print_table(("tensor", "type", "shape", "file"), rows.values())
    else:
        parameters = [row[:3] for name, row in rows.items() if name.startswith(PARAMETERS)]
        print_table(("tensor", "type", "shape"), parameters)
    for other, stored in manifest.aliases.items():
        if everything or other.startswith(PARAMETERS):
            print(f"{other} is {stored}")
    if not everything:
        _show_others(manifest)


def _group(name: str) -> str:
    """``/optimizer`` of ``/optimizer/exp_avg/head.weight``."""
    return name[: name.index("/", 1)] if "/" in name[1:] else name


def _show_others(manifest: Manifest) -> None:
    """A line for all tensors of a kind that are no parameters."""
    from mpipipe.formats.checkpoint import PARAMETERS

    others: dict[str, list[int]] = {}
    for name, entry in manifest.tensors.items():
        if not name.startswith(PARAMETERS):
            others.setdefault(_group(name), []).append(entry.nbytes)
    for group, sizes in others.items():
        print(f"{group}: {counted(len(sizes), 'tensor')}, {format_bytes(sum(sizes))}; --all lists them")


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
    """Raise CheckpointNotFoundError for what is no folder, or one in which nothing of a run lies."""
    from mpipipe.formats.paths import RunPaths

    if not run_dir.is_dir():
        raise CheckpointNotFoundError(f"{run_dir}: no such run folder (current folder: {Path.cwd()})")
    paths = RunPaths(run_dir)
    if not any(path.exists() for path in (paths.config, paths.status, paths.metrics, paths.checkpoints, paths.trace)):
        raise CheckpointNotFoundError(
            f"{run_dir} is no run folder: it has no {paths.checkpoints.name}, no {paths.config.name} and no "
            f"{paths.status.name}; give the folder that run.dir names"
        )


def _folder_of(run_dir: Path, step: int | None) -> Path:
    """The folder of one checkpoint: ``run_dir`` itself, that of ``step``, or the newest complete one."""
    from mpipipe.formats.checkpoint import MANIFEST_NAME, find_checkpoint
    from mpipipe.formats.paths import RunPaths

    if step is None and (run_dir / MANIFEST_NAME).exists():
        return run_dir
    _check_run_dir(run_dir)
    return find_checkpoint(RunPaths(run_dir).checkpoints, step)
