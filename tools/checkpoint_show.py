#!/usr/bin/env python3
"""Show what is in a checkpoint, with numpy and h5py alone: an example of reading one without mpipipe.

    python tools/checkpoint_show.py RUN_DIR/checkpoints/step-00000100              every tensor, scalars
    python tools/checkpoint_show.py .../step-00000100 /parameters/NAME [-o x.npy]  one tensor: figures; as a file
    python tools/checkpoint_show.py .../step-00000100 --config                     the run file

checkpoint.h5 holds a link to every tensor by name, so h5py follows them as if all were one file. Nothing is verified
here: `mpipipe.formats.checkpoint.find_problems(FOLDER)` does.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import h5py
import numpy as np

GROUPS_THAT_ARE_NO_TENSORS = ("config", "scalars")


def open_checkpoint(folder: Path) -> h5py.File:
    """The master file of a complete checkpoint; SystemExit with a message for anything else."""
    if not (folder / "manifest.json").is_file():
        sys.exit(f"{folder}: no manifest.json: not a checkpoint, or a save that did not end")
    file = h5py.File(folder / "checkpoint.h5", "r", locking="best-effort")
    if file.attrs.get("format") != "mpipipe-checkpoint":
        sys.exit(f"{file.filename}: format {file.attrs.get('format')!r}, not 'mpipipe-checkpoint'")
    if file.attrs["version"] != 1:
        sys.exit(f"{file.filename}: version {file.attrs['version']}; this script knows version 1")
    return file


def tensor_names(group: h5py.Group, prefix: str = "") -> list[str]:
    """Full paths of all links to tensors, sorted so that h.10 comes after h.9."""
    names = []
    for key in group:
        path = f"{prefix}/{key}"
        if path[1:] in GROUPS_THAT_ARE_NO_TENSORS:
            continue
        if isinstance(group.get(key, getlink=True), h5py.ExternalLink):
            names.append(path)
        else:
            names += tensor_names(group[key], path)
    return sorted(
        names, key=lambda name: [(part.isdigit(), int(part) if part.isdigit() else part) for part in name.split(".")]
    )


def stored_in(file: h5py.File, name: str) -> tuple[str, str]:
    """(file, dataset) that holds the bytes; two names with the same answer share a tensor."""
    link = file.get(name, getlink=True)
    return link.filename, link.path


def tensor_of(file: h5py.File, name: str) -> h5py.Dataset:
    """The tensor behind a link; SystemExit naming the shard when that can't be opened."""
    try:
        return file[name]
    except (OSError, KeyError) as error:
        sys.exit(f"{name}: not to be had from {stored_in(file, name)[0]}, which is missing or damaged: {error}")


def manifest_types(folder: Path) -> dict[str, str]:
    """Element types by stored name: numpy shows bfloat16 as another type, the manifest names it."""
    return {tensor["name"]: tensor["dtype"] for tensor in json.loads((folder / "manifest.json").read_text())["tensors"]}


def figures(array: np.ndarray) -> str:
    if not array.size:
        return "empty"
    values = array.astype(np.float64)
    norm = np.sqrt((values * values).sum())
    return f"min {values.min():.6g}  max {values.max():.6g}  mean {values.mean():.6g}  norm {norm:.6g}"


def show_all(folder: Path, file: h5py.File) -> None:
    print(f"step {file.attrs['step']}")
    for key, dataset in file["scalars"].items():
        value = dataset[()]
        print(f"{key} {value.decode() if isinstance(value, bytes) else value}")
    types = manifest_types(folder)
    elements = 0
    for name in tensor_names(file):
        shard, stored = stored_in(file, name)
        shape = tensor_of(file, name).shape
        same = "" if stored == name else f"  the same as {stored}"
        elements += 0 if same else int(np.prod(shape))
        print(f"{name}  {types[stored]}  {'x'.join(map(str, shape)) or 'scalar'}  {shard}{same}")
    print(f"{len(types)} tensors, {elements} elements")


def show_one(file: h5py.File, name: str, output: Path | None) -> None:
    if not isinstance(file.get(name, getlink=True), h5py.ExternalLink):
        sys.exit(f"{file.filename}: no tensor {name!r}; without a name, all are listed")
    array = tensor_of(file, name)[()]
    print(f"{name}  {array.dtype}  {'x'.join(map(str, array.shape)) or 'scalar'}  {figures(array)}")
    if output is not None:
        np.save(output, array)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkpoint's folder, as RUN_DIR/checkpoints/step-00000100")
    parser.add_argument("tensor", nargs="?", help="full name of one tensor")
    parser.add_argument("-o", "--output", type=Path, help="write that tensor to this .npy file")
    parser.add_argument("--config", action="store_true", help="print the run file that is kept in the checkpoint")
    arguments = parser.parse_args()
    if arguments.output is not None and arguments.tensor is None:
        parser.error("-o needs the name of a tensor")
    try:
        with open_checkpoint(arguments.folder) as file:
            if arguments.config:
                print(file["config"].asstr()[()], end="")
            elif arguments.tensor:
                show_one(file, arguments.tensor, arguments.output)
            else:
                show_all(arguments.folder, file)
    except (OSError, KeyError) as error:
        sys.exit(f"{arguments.folder / 'checkpoint.h5'}: {error}")


if __name__ == "__main__":
    main()
