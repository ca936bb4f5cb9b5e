#!/usr/bin/env python3
"""Dump the events of one trace file as CSV: an example of reading a trace with numpy and h5py only.

    python tools/trace_events.py RUN_DIR/trace/segment-0001/rank-00003.h5 -o events.csv
    python tools/trace_events.py FILE --steps 10:20 --kinds F,B

Times are the rank's own clock in nanoseconds; --rank0-clock moves them onto rank 0's by the file's /clock samples.
"""

from __future__ import annotations

import argparse
import sys

import h5py
import numpy as np


def main() -> int:
    parser = argparse.ArgumentParser(description="Events of a trace file as CSV.")
    parser.add_argument("file")
    parser.add_argument("-o", "--output", help="file to write (default: standard output)")
    parser.add_argument("--steps", help="first:end, the end left out")
    parser.add_argument("--kinds", help="names with commas between, as F,B,RECV_WAIT")
    parser.add_argument("--rank0-clock", action="store_true", help="times on rank 0's clock")
    options = parser.parse_args()
    try:
        with h5py.File(options.file, "r", locking=False) as file:
            if file.attrs.get("format") != "mpipipe-trace":
                raise OSError(f"format is {file.attrs.get('format')!r}, not 'mpipipe-trace'")
            rank = int(file.attrs["rank"])
            names = {value: name for name, value in h5py.check_enum_dtype(file["events"].dtype["kind"]).items()}
            events, clock = file["events"][:], file["clock"][:]
    except OSError as error:
        print(f"{options.file}: {error}", file=sys.stderr)
        return 2

    if options.steps:
        first, end = (int(part) if part else None for part in options.steps.split(":"))
        events = events[(events["step"] >= (first or 0)) & (events["step"] < (end if end is not None else 1 << 31))]
    if options.kinds:
        wanted = [value for value, name in names.items() if name in options.kinds.split(",")]
        events = events[np.isin(events["kind"], wanted)]
    if options.rank0_clock and len(clock):
        for key in ("t0_ns", "t1_ns"):
            events[key] += np.rint(np.interp(events[key], clock["local_ns"], clock["offset_ns"])).astype(np.int64)

    columns = events.dtype.names
    target = open(options.output, "w", encoding="utf-8") if options.output else sys.stdout  # noqa: SIM115
    try:
        print("rank", *columns, sep=",", file=target)
        for event in events:
            pairs = zip(columns, event.tolist(), strict=True)
            values = (names.get(value, value) if key == "kind" else value for key, value in pairs)
            print(rank, *values, sep=",", file=target)
    finally:
        if options.output:
            target.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
