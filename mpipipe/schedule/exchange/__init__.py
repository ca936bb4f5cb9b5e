"""Tables in files: CSV with our header and without, HDF5, torch's CSV, and a simulated timeline as Chrome JSON.

Not imported with ``mpipipe.schedule``; HDF5 (h5py) is loaded only when such a file is read or written.
"""

from __future__ import annotations

from mpipipe.schedule.exchange.chrome import chrome_text
from mpipipe.schedule.exchange.files import (
    TABLE_FORMS,
    load_table,
    load_with_places,
    save_table,
    table_text,
)
from mpipipe.schedule.exchange.loaded import LoadedTable, Place
from mpipipe.schedule.exchange.named import is_file, table_named
from mpipipe.schedule.exchange.outputs import write_output

__all__ = [
    "TABLE_FORMS",
    "LoadedTable",
    "Place",
    "chrome_text",
    "is_file",
    "load_table",
    "load_with_places",
    "save_table",
    "table_named",
    "table_text",
    "write_output",
]
