"""State of a run <-> checkpoint folders: saving by all ranks together, finding, loading, keeping a few.

Tensors are known by full dataset paths (``/parameters/NAME``, ``/optimizer/exp_avg/NAME``); nothing depends on how many
ranks there are or which rank owns what.
"""

from mpipipe.checkpoint.loading import LoadedCheckpoint, check_names, load, restore
from mpipipe.checkpoint.retention import Pruned, prune
from mpipipe.checkpoint.saving import CheckpointState, save
from mpipipe.formats.checkpoint import find_latest

__all__ = [
    "CheckpointState",
    "LoadedCheckpoint",
    "Pruned",
    "check_names",
    "find_latest",
    "load",
    "prune",
    "restore",
    "save",
]
