"""A simulated timeline as Chrome trace-event JSON, for Perfetto (ui.perfetto.dev) and chrome://tracing.

One process a rank, in it a track for computing, one for receiving and as many for sending as there are messages on the
way at once. A flow leads from each send to its receive. Letters: A = number of actions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpipipe.errors import ScheduleError
from mpipipe.schedule.action import Kind
from mpipipe.schedule.simulate import Simulation

_COMPUTE, _RECEIVES, _SENDS = 1, 1000, 2000
_TRACKS = ((_COMPUTE, "compute"), (_RECEIVES, "receives"), (_SENDS, "sends"))
_SCALES: tuple[int, ...] = (10**3, 10**4, 10**5, 10**6, 10**7, 10**8, 10**9)
_LONGEST_US = 10**12

MOST_ACTIONS = 200_000
"""Actions of the largest table whose timeline is made."""


def chrome_text(simulation: Simulation) -> str:
    """The events of ``simulation`` as one JSON object, an event a line.

    Times are whole microseconds; ``otherData.unit_us`` says how many stand for one unit of the costs. A receive lasts
    from when its rank has nothing else to do until the message is there; a send as long as the message is on its way.
    Raises ScheduleError for more than 200,000 actions and for times without end.
    """
    if simulation.table.num_actions > MOST_ACTIONS:
        raise ScheduleError(
            f"{simulation.table!r} is too large for a timeline of at most {MOST_ACTIONS} actions: take a smaller p, v "
            "or m"
        )
    scale = _scale(simulation)
    about = {
        "schedule": simulation.table.name,
        "p": simulation.table.p,
        "v": simulation.table.v,
        "m": simulation.table.m,
        "unit_us": scale,
        "latency": simulation.latency,
        "makespan": simulation.makespan,
    }
    events = ",\n".join(json.dumps(event, allow_nan=False) for event in _events(simulation, scale))
    head = json.dumps(about, allow_nan=False)
    return f'{{"displayTimeUnit": "ms", "otherData": {head},\n"traceEvents": [\n{events}\n]}}\n'


def _scale(simulation: Simulation) -> int | float:
    """Microseconds for a unit of the costs: the least power of ten from 1000 on that makes every time a whole number,
    else the one that gives the makespan 9 or 10 digits."""
    delays = simulation.hops.per_stage(simulation.table.num_stages)
    longest = simulation.makespan + float(delays.max())
    if not math.isfinite(longest):
        raise ScheduleError("the simulated times are infinite: give smaller costs and latency")
    times = np.unique(np.concatenate((simulation.start, simulation.end, delays)))
    for scale in _SCALES:
        if longest * scale > _LONGEST_US:
            break
        if bool(np.all(np.abs(times * scale - np.rint(times * scale)) < 1e-6)):
            return scale
    return math.pow(10, 9 - math.floor(math.log10(longest))) if longest > 0 else _SCALES[0]


class _Message(NamedTuple):
    """A message: the flat indices of the actions that make and use it, when it leaves and is there (microseconds)."""

    maker: int
    user: int
    leaves: int
    arrives: int


def _events(simulation: Simulation, scale: int | float) -> Iterator[dict[str, Any]]:
    table = simulation.table
    start, end = _whole(simulation.start * scale), _whole(simulation.end * scale)
    ranks = np.repeat(np.arange(table.p), np.diff(table.offsets)).tolist()
    messages = _messages(simulation, scale)
    spans = [(ranks[i], int(start[i]), int(end[i])) for i in range(table.num_actions)]
    sends = [(ranks[each.maker], each.leaves, each.arrives) for each in messages]
    compute_lanes, send_lanes = _lanes(spans), _lanes(sends)
    yield from _names(table.p, ranks, compute_lanes, [sender for sender, _, _ in sends], send_lanes)
    for index, (rank, begin, stop) in enumerate(spans):
        action = table.action(index)
        about = {"stage": action.stage, "microbatch": action.microbatch, "kind": action.kind.name}
        yield _slice(rank, _COMPUTE + compute_lanes[index], begin, stop, str(action), "compute", about)
    for number, message in enumerate(messages):
        yield from _transfer(simulation, message, number, ranks, start, end, _SENDS + send_lanes[number])


def _messages(simulation: Simulation, scale: int | float) -> list[_Message]:
    """All messages in the order in which they leave."""
    table, end = simulation.table, simulation.end
    users = np.flatnonzero(simulation.needs >= 0)
    makers = simulation.needs[users]
    between = np.minimum(table.stages[users], table.stages[makers])
    arrivals = end[makers] + simulation.hops.per_stage(table.num_stages)[between]
    columns = (makers, users, _whole(end[makers] * scale), _whole(arrivals * scale))
    order = np.lexsort((users, end[makers]))
    return [_Message(*each) for each in zip(*(column[order].tolist() for column in columns), strict=True)]


def _whole(times: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.rint(times).astype(np.int64)


def _transfer(
    simulation: Simulation,
    message: _Message,
    number: int,
    ranks: list[int],
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    send_track: int,
) -> Iterator[dict[str, Any]]:
    """The send, the receive and the flow between them."""
    table, user = simulation.table, message.user
    made, used = table.action(message.maker), table.action(user)
    forward = used.kind == Kind.F
    kinds = (Kind.SEND_F, Kind.RECV_F) if forward else (Kind.SEND_B, Kind.RECV_B)
    sender, receiver = ranks[message.maker], ranks[user]
    first = user == int(table.offsets[receiver])
    taken = int(start[user])
    waits = min(0 if first else int(end[user - 1]), taken)
    texts = [str(made._replace(kind=kinds[0])), str(used._replace(kind=kinds[1]))]
    about = {"from_rank": sender, "to_rank": receiver, "microbatch": made.microbatch}
    flow = {"cat": "message", "name": "activation" if forward else "gradient", "id": number}
    yield _slice(sender, send_track, message.leaves, message.arrives, texts[0], "send", about)
    yield {"ph": "s", **flow, "pid": sender, "tid": send_track, "ts": message.leaves}
    yield _slice(receiver, _RECEIVES, waits, taken, texts[1], "receive", about)
    yield {"ph": "f", "bp": "e", **flow, "pid": receiver, "tid": _RECEIVES, "ts": taken}


def _slice(
    rank: int, track: int, begin: int, stop: int, name: str, category: str, about: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": rank,
        "tid": track,
        "ts": begin,
        "dur": stop - begin,
        "args": about,
    }


def _lanes(spans: list[tuple[int, int, int]]) -> list[int]:
    """A lane for each (rank, begin, end) such that those of one rank and lane have no time in common: the lowest that
    is free at its begin."""
    lanes = [0] * len(spans)
    free: dict[int, list[int]] = {}
    for index in sorted(range(len(spans)), key=lambda i: (spans[i][1], i)):
        rank, begin, stop = spans[index]
        ends = free.setdefault(rank, [])
        lane = next((lane for lane, until in enumerate(ends) if until <= begin), len(ends))
        if lane == len(ends):
            ends.append(stop)
        else:
            ends[lane] = stop
        lanes[index] = lane
    return lanes


def _names(
    p: int, ranks: list[int], compute_lanes: list[int], senders: list[int], send_lanes: list[int]
) -> Iterator[dict[str, Any]]:
    """Names and order of processes and tracks."""
    tracks = {(rank, track): name for rank in range(p) for track, name in _TRACKS}
    for base, name, owners, lanes in (
        (_COMPUTE, "compute", ranks, compute_lanes),
        (_SENDS, "sends", senders, send_lanes),
    ):
        for rank, lane in sorted(set(zip(owners, lanes, strict=True))):
            tracks[rank, base + lane] = name if lane == 0 else f"{name} {lane + 1}"
    for rank in range(p):
        yield _about(rank, _COMPUTE, "process_name", {"name": f"rank {rank}"})
        yield _about(rank, _COMPUTE, "process_sort_index", {"sort_index": rank})
    for (rank, track), name in sorted(tracks.items()):
        yield _about(rank, track, "thread_name", {"name": name})
        yield _about(rank, track, "thread_sort_index", {"sort_index": track})


def _about(rank: int, track: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": track, "args": arguments}
