"""A table for fewer microbatches, made from one for more. Letters: m = num_microbatches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mpipipe.errors import ScheduleError
from mpipipe.schedule.table import ScheduleTable


def fewer_microbatches(table: ScheduleTable, m: int) -> ScheduleTable:
    """The table without the actions of microbatches from ``m`` on: legal if ``table`` is, with the same placement.

    No action waits for a microbatch that is gone, so nothing comes later than before. Of an overlapped pair the
    remaining action stands alone. Raises ScheduleError for an m that is not 1..``table.m``, and for a table with two
    copies of a stage, which share the microbatches by halves.
    """
    if not 1 <= m <= table.m or table.mirror is not None:
        raise ScheduleError(f"{table!r} can't be cut down to {m} microbatches")
    kept = np.flatnonzero(table.microbatches < m)
    pairs = table.overlaps[(table.microbatches[table.overlaps] < m) & (table.microbatches[table.overlaps + 1] < m)]
    return replace(
        table,
        m=m,
        offsets=np.searchsorted(kept, table.offsets).astype(np.int64),
        kinds=table.kinds[kept],
        stages=table.stages[kept],
        microbatches=table.microbatches[kept],
        overlaps=np.searchsorted(kept, pairs).astype(np.int64),
        extras=(),
    )
