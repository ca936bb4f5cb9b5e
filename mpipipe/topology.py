"""Which rank holds which stage of the model.

Letters (this file and ``schedule/``): p = num_ranks, v = chunks_per_rank, m = num_microbatches, r = a rank, s = a
stage. A *stage* is a global piece of the model, 0 .. p*v-1; a *chunk* is a local one, 0 .. v-1. A *placement* is a
tuple with the rank of each stage.
"""

from __future__ import annotations

from mpipipe.errors import TopologyError


def loop_placement(p: int, v: int) -> tuple[int, ...]:
    """Rank of each of the p*v stages, stage s on rank ``s % p``: the stages go round the ranks v times.

    Raises TopologyError when p or v is below 1.
    """
    _check_sizes(p, v)
    return tuple(s % p for s in range(p * v))


def zigzag_placement(p: int, v: int) -> tuple[int, ...]:
    """Rank of each of the p*v stages when the stages go down the ranks, turn, come up, turn, and so on: chunk c of rank
    r is stage ``c*p + r`` for even c, ``c*p + p-1-r`` for odd c. At a turn two stages in a row are on one rank.

    Raises TopologyError when p or v is below 1.
    """
    _check_sizes(p, v)
    return tuple(s % p if s // p % 2 == 0 else p - 1 - s % p for s in range(p * v))


def v_placement(p: int) -> tuple[int, ...]:
    """Rank of each of 2p stages, once down the ranks and back up: rank r holds stages r and 2p-1-r.

    Raises TopologyError when p is below 1.
    """
    return zigzag_placement(p, 2)


def _check_sizes(p: int, v: int) -> None:
    for key, value in (("pipeline.ranks", p), ("pipeline.chunks", v)):
        if value < 1:
            raise TopologyError(f"{value} is too small", key=key, value=value, allowed="a whole number, 1 or more")


def stages_on(placement: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The global stages of ``rank``, ascending; the position in the tuple is the chunk number."""
    return tuple(s for s, owner in enumerate(placement) if owner == rank)


def chunk_of(placement: tuple[int, ...], stage: int) -> int:
    """Local number of ``stage`` on the rank that holds it: how many earlier stages that rank holds."""
    return placement[:stage].count(placement[stage])
