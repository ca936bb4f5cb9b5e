"""Where each rank is and what it waits for, in the words of the schedule table; and who waits for whom."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

NAMES_SHOWN = 8
"""Open messages of one kind that are named; the others are counted."""


@dataclass(frozen=True, slots=True)
class Place:
    """What the engine of a rank is at: ``at`` as ``"at 2RECV_F3 (row 7, step 4)"``, ``open`` as ``open_text`` makes
    it. ``held_up``: ranks whose messages have not begun, because this rank's device has not come so far.
    """

    at: str = "outside of a step"
    open: str = "nothing"
    held_up: tuple[int, ...] = ()


PlaceOf = Callable[[bool], Place]
"""Called with True where requests may be tested: then what has completed meanwhile is left out."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A rank, its place, and what it waits for: ``waits_for`` as ``"1SEND_F3 of rank 1"``, empty if it does not wait;
    ``peer`` the rank at the other end, or -1.
    """

    rank: int
    place: Place
    waits_for: str = ""
    peer: int = -1

    def line(self) -> str:
        """The whole of it in one line."""
        doing = f" waits for {self.waits_for}" if self.waits_for else ", not waiting"
        return f"rank {self.rank} {self.place.at}{doing}; open: {self.place.open}"

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> Standing:
        fields = json.loads(packed)
        place = fields["place"] | {"held_up": tuple(fields["place"]["held_up"])}
        return cls(**(fields | {"place": Place(**place)}))


def open_text(receives: Sequence[str], sends: Sequence[str]) -> str:
    """``"2 receives (1SEND_F4 of rank 1, 3SEND_B0 of rank 3), 1 send (2SEND_F2 to rank 3)"``, or ``"nothing"``."""
    parts = []
    for word, names in (("receive", receives), ("send", sends)):
        if names:
            more = ["..."] if len(names) > NAMES_SHOWN else []
            plural = "" if len(names) == 1 else "s"
            parts.append(f"{len(names)} {word}{plural} ({', '.join([*names[:NAMES_SHOWN], *more])})")
    return ", ".join(parts) or "nothing"


def graph_text(standings: Mapping[int, Standing], size: int) -> str:
    """Who waits for whom, a line a rank; then each circle of ranks that wait for each other; then who did not answer.

    ``standings``: of the ranks that answered, of ``size``.
    """
    lines = []
    for rank, standing in sorted(standings.items()):
        if not standing.waits_for:
            lines.append(f"rank {rank} does not wait, it is {standing.place.at}")
            continue
        lines.append(f"rank {rank} waits for {standing.waits_for}{_where(standing, standings, size)}")
    for circle in circles(standings):
        pairs = zip(circle, [*circle[1:], circle[0]], strict=True)
        lines.append("they wait in a circle: " + ", ".join(f"rank {one} for rank {next_}" for one, next_ in pairs))
    missing = [rank for rank in range(size) if rank not in standings]
    if len(missing) == 1:
        lines.append(f"rank {missing[0]} does not answer: it computes, or is stuck outside of MPI")
    elif missing:
        names = ", ".join(map(str, missing))
        lines.append(f"ranks {names} do not answer: they compute, or are stuck outside of MPI")
    return "\n".join(lines)


def _where(standing: Standing, standings: Mapping[int, Standing], size: int) -> str:
    """The place of the rank that ``standing`` waits for."""
    peer = standing.peer
    if peer == standing.rank or not 0 <= peer < size:
        return ""
    which = ", which" if standing.waits_for.endswith(f" of rank {peer}") else f"; rank {peer}"
    if peer not in standings:
        return f"{which} does not answer"
    late = ", and whose device has not come so far" if standing.rank in standings[peer].place.held_up else ""
    return f"{which} is {standings[peer].place.at}{late}"


def circles(standings: Mapping[int, Standing]) -> list[list[int]]:
    """Every circle of ranks each of which waits for the next one, from its lowest rank on. Who waits for another's
    device does not wait for that rank.
    """
    found = []
    seen: set[int] = set()
    for start in sorted(standings):
        way: list[int] = []
        rank = start
        while _waits_for_peer(standings, rank) and rank not in seen:
            seen.add(rank)
            way.append(rank)
            rank = standings[rank].peer
        if rank in way:
            circle = way[way.index(rank) :]
            first = circle.index(min(circle))
            found.append(circle[first:] + circle[:first])
    return found


def _waits_for_peer(standings: Mapping[int, Standing], rank: int) -> bool:
    """Whether ``rank`` waits for what its peer does, and not for the peer's device."""
    if rank not in standings or not standings[rank].waits_for:
        return False
    peer = standings.get(standings[rank].peer)
    return peer is None or rank not in peer.place.held_up


def report_text(standings: Mapping[int, Standing], size: int) -> str:
    """Every rank's line, then the graph."""
    lines = [standing.line() for _, standing in sorted(standings.items())]
    return "\n".join(["where the ranks are:", *lines, "who waits for whom:", graph_text(standings, size)])
