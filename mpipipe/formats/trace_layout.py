"""The rows of a trace file: one event, one clock sample, one step, one stage.

p: pipeline ranks, v: chunks per rank, d: replicas. Times are nanoseconds of the rank's own CLOCK_MONOTONIC
(``time.perf_counter_ns()`` and ``time.monotonic_ns()`` on Linux), never corrected in the file. -1 where a field does
not apply.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import h5py
import numpy as np

FORMAT = "mpipipe-trace"
VERSION = 1
CLOCK = "CLOCK_MONOTONIC"
CHUNK_ROWS = 8192


class EventKind(IntEnum):
    """What an event's time was spent on. F, B, I, W are computing; the kinds up to SEND_WAIT belong to the
    pipeline."""

    F = 0
    B = 1
    I = 2  # noqa: E741
    W = 3
    RECV_WAIT = 4
    SEND_POST = 5
    SEND_WAIT = 6
    LOAD_DATA = 7
    LOSS = 8
    COPY_TO_HOST = 9
    COPY_TO_DEVICE = 10
    REPLICA_REDUCE = 11
    TIED_REDUCE = 12
    CLIP = 13
    OPTIMIZER = 14
    CHECKPOINT = 15
    EVALUATE = 16


COMPUTE_KINDS = (EventKind.F, EventKind.B, EventKind.I, EventKind.W)
LAST_COMPUTE_KIND = int(EventKind.W)
LAST_PIPELINE_KIND = int(EventKind.SEND_WAIT)

FLAG_GRADIENT = 1
"""The message of a RECV_WAIT, SEND_POST or SEND_WAIT holds a gradient (an activation without it)."""
FLAG_LOCAL = 2
"""Sender and receiver are on one rank: no MPI message."""
FLAG_DEVICE_TIME = 4
"""The times are a device's, anchored to the host clock."""

EVENT_STRUCT = struct.Struct("<qqqqiiiiIHhHBB")
"""Packs one event; its arguments are the fields of EVENT_DTYPE in order."""

EVENT_DTYPE = np.dtype(
    [
        ("t0_ns", "<i8"),
        ("t1_ns", "<i8"),
        ("nbytes", "<i8"),
        ("memory_bytes", "<i8"),
        ("step", "<i4"),
        ("row", "<i4"),
        ("microbatch", "<i4"),
        ("peer", "<i4"),
        ("sequence", "<u4"),
        ("table", "<u2"),
        ("stage", "<i2"),
        ("flags", "<u2"),
        ("chunk", "u1"),
        ("kind", h5py.enum_dtype({kind.name: int(kind) for kind in EventKind}, basetype="u1")),
    ]
)
"""One event, 60 bytes, little-endian, packed."""

CLOCK_DTYPE = np.dtype([("local_ns", "<i8"), ("offset_ns", "<i8"), ("rtt_ns", "<i8")])
"""A clock sample: rank 0's clock minus this rank's, when this rank's showed local_ns; wrong by at most rtt_ns / 2."""

STEP_DTYPE = np.dtype(
    [("step", "<i4"), ("table", "<i4"), ("t0_ns", "<i8"), ("t1_ns", "<i8"), ("tokens", "<i8"), ("loss", "<f8")]
)
"""A finished step on this rank; loss NaN where the rank does not know it."""

MODEL_DTYPE = np.dtype(
    [
        ("stage", "<i4"),
        ("num_layers", "<i4"),
        ("parameters", "<i8"),
        ("forward_flops_per_token", "<f8"),
        ("backward_flops_per_token", "<f8"),
        ("peak_flops_per_s", "<f8"),
        ("peak_is_dense", "<i4"),
        ("layers", h5py.string_dtype("utf-8")),
    ]
)
"""A stage: its layers' names with a space between, parameters, FLOPs; NaN or -1 where unknown."""

MODEL_DEFAULTS: dict[str, object] = {
    "num_layers": -1,
    "parameters": -1,
    "forward_flops_per_token": float("nan"),
    "backward_flops_per_token": float("nan"),
    "peak_flops_per_s": float("nan"),
    "peak_is_dense": -1,
    "layers": "",
}
