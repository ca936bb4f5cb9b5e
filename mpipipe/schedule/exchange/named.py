"""The table that a word names: a family of schedules, or a file. Letters: p = num_ranks, v = chunks_per_rank, m =
num_microbatches."""

from __future__ import annotations

from pathlib import Path

from mpipipe.errors import ScheduleError
from mpipipe.schedule.check import verify
from mpipipe.schedule.exchange.files import load_table
from mpipipe.schedule.lower import strip
from mpipipe.schedule.registry import FAMILIES, build
from mpipipe.schedule.table import ScheduleTable

_TABLE_ENDINGS = (".csv", ".h5", ".hdf5")


def is_file(name: str) -> bool:
    """True for what names the file of a table rather than a schedule: it ends as one, has a folder, or is there."""
    if name.partition(":")[0] in FAMILIES:
        return False
    return name.lower().endswith(_TABLE_ENDINGS) or "/" in name or Path(name).is_file()


def table_named(name: str, *, p: int, v: int, m: int) -> ScheduleTable:
    """The table of ``pipeline.schedule = name`` for p ranks, v chunks per rank and m microbatches: compute-only, legal.

    ``name``: a family, with options as in ``1f1b:warmup=2``, or the path of a table's file, relative to the current
    folder. Raises ScheduleError, in configuration keys, for an unknown family, numbers that it does not take, a file
    that is no legal table, and one that is for other numbers.
    """
    if not is_file(name):
        return build(name, p=p, v=v, m=m)
    table = strip(load_table(name))
    wanted = (("pipeline.ranks", p, table.p), ("pipeline.chunks", v, table.v),
              ("m, from batch.sequences and batch.microbatch,", m, table.m))  # fmt: skip
    for key, asked, found in wanted:
        if asked != found:
            raise ScheduleError(
                f"pipeline.schedule = '{name}' is a table for p = {table.p} ranks, v = {table.v} chunks a rank and "
                f"m = {table.m} microbatches; {key} is {asked}: set it to {found}, or name a table for {asked}"
            )
    try:
        verify(table)
    except ScheduleError as error:
        error.add_note(f"'mpipipe schedule check {name}' tells all that is wrong with it, with lines and cells")
        raise
    return table
