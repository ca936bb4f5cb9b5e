"""One clock for all ranks: a rank's times moved onto rank 0's clock by its ping-pong samples.

Between two samples the offset is linear; outside them it goes on with the slope of all samples. A clock that was set
back within the trace is recognised by event times that fall, and undone where the samples show by how much.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mpipipe.formats.trace import FLAG_DEVICE_TIME, TraceFile

_SET_BACK_NS = 1_000_000  # a fall of event ends by more is no rounding of device times
_SHORTEST_BASE_NS = 100_000_000  # a slope over less says more about the round trips than about the clocks
_LARGEST_DRIFT = 1e-3


@dataclass(frozen=True)
class CorrectedTimes:
    """Events and steps on rank 0's clock (copies), how wrong they may be (half the worst round trip), and remarks."""

    events: npt.NDArray[np.void]
    steps: npt.NDArray[np.void]
    error_ns: float
    remarks: list[str]


def correct(trace: TraceFile) -> CorrectedTimes:
    """The times of ``trace`` on rank 0's clock; rank 0 and a trace without samples keep theirs."""
    events, steps, clock = trace.events.copy(), trace.steps.copy(), trace.clock.copy()
    remarks: list[str] = []
    _undo_setback(events, steps, clock, remarks)
    if trace.rank == 0 or not len(clock):
        return CorrectedTimes(events, steps, 0.0, remarks)
    order = np.argsort(clock["local_ns"], kind="stable")
    clock = clock[order]
    if len(clock) == 1:
        remarks.append("clock compared once only: drift is not corrected (25 ppm are 25 us a second)")
    local = clock["local_ns"].astype(np.float64) - float(clock["local_ns"][0])
    slopes = np.diff(clock["offset_ns"]) / np.maximum(np.diff(local), 1.0)
    far = np.abs(slopes) * np.diff(local) > _LARGEST_DRIFT * np.diff(local) + clock["rtt_ns"][1:] + clock["rtt_ns"][:-1]
    if far.any():
        remarks.append(f"clock jumped against rank 0's after samples {np.flatnonzero(far).tolist()}: times are unsure")
    for table, names in ((events, ("t0_ns", "t1_ns")), (steps, ("t0_ns", "t1_ns"))):
        for name in names:
            table[name] += _offset(table[name], clock)
    return CorrectedTimes(events, steps, float(clock["rtt_ns"].max()) / 2, remarks)


def _offset(times: npt.NDArray[np.int64], clock: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """Rank 0's clock minus this rank's at ``times``, to the nanosecond."""
    first_local, first_offset = int(clock["local_ns"][0]), int(clock["offset_ns"][0])
    local = (clock["local_ns"] - first_local).astype(np.float64)
    offset = (clock["offset_ns"] - first_offset).astype(np.float64)
    at = (times - first_local).astype(np.float64)
    result = np.interp(at, local, offset)
    if local[-1] >= _SHORTEST_BASE_NS:
        slope = offset[-1] / local[-1]
        result += slope * (np.minimum(at, 0.0) + np.maximum(at - local[-1], 0.0))
    return first_offset + np.rint(result).astype(np.int64)


def _undo_setback(
    events: npt.NDArray[np.void], steps: npt.NDArray[np.void], clock: npt.NDArray[np.void], remarks: list[str]
) -> None:
    """Make the clock of a rank go on where it was set back once, in place; only remark on it where that can't be
    done."""
    recorded = np.flatnonzero(events["flags"] & FLAG_DEVICE_TIME == 0)  # a device's times come once its step is over
    ends = events["t1_ns"][recorded]
    falls = np.flatnonzero(np.diff(ends) < -_SET_BACK_NS)
    if not falls.size:
        return
    drop = int(ends[falls[0]] - ends[falls[0] + 1])
    jumps = np.diff(clock["offset_ns"])
    if falls.size > 1 or not jumps.size or jumps.max() < drop:
        remarks.append(f"event times fall back at {falls.size} places (first by {drop / 1e9:.6f} s): times are unsure")
        return
    sample, first = int(jumps.argmax()) + 1, int(recorded[falls[0] + 1])
    jump = int(jumps[sample - 1])
    remarks.append(f"clock was set back by {jump / 1e9:.6f} s at step {int(events['step'][first])}: undone")
    across = events["t0_ns"][first] > events["t1_ns"][first]
    events["t0_ns"][first + int(across) :] += jump
    events["t1_ns"][first:] += jump
    later = steps["step"] > events["step"][first]
    within = steps["step"] == events["step"][first]
    between_steps = events["step"][first - 1] != events["step"][first]
    steps["t0_ns"][later | (within & between_steps)] += jump
    steps["t1_ns"][later | within] += jump
    clock["local_ns"][sample:] += jump
    clock["offset_ns"][sample:] -= jump
