"""Where ranks are and who waits for whom, from given states."""

from __future__ import annotations

import numpy as np
import pytest

from mpipipe.errors import TransportError
from mpipipe.transport import Place, Standing, Transport, open_text, run_ranks
from mpipipe.transport.standing import circles, graph_text, report_text

TWO = Standing(
    2,
    Place(
        "at 2RECV_F3 (row 7, step 4)",
        "2 receives (1SEND_F4 of rank 1, 3SEND_B0 of rank 3), 1 send (2SEND_F2 to rank 3)",
    ),
    "1SEND_F3 of rank 1",
    1,
)
ONE = Standing(1, Place("at 1RECV_B1 (row 3, step 4)"), "2SEND_B1 of rank 2", 2)
ZERO = Standing(
    0, Place("at the end of its row in step 4", "1 send (0SEND_F5 to rank 1)"), "rank 1 to take 0SEND_F5", 1
)


def waits(rank: int, peer: int) -> Standing:
    return Standing(rank, Place(f"at {rank}B0 (row 1, step 2)"), f"{peer}SEND_B0 of rank {peer}", peer)


def by_rank(*standings: Standing) -> dict[int, Standing]:
    return {standing.rank: standing for standing in standings}


def test_a_line_has_place_wait_and_open_requests() -> None:
    assert TWO.line() == (
        "rank 2 at 2RECV_F3 (row 7, step 4) waits for 1SEND_F3 of rank 1; open: 2 receives (1SEND_F4 of rank 1, "
        "3SEND_B0 of rank 3), 1 send (2SEND_F2 to rank 3)"
    )
    computes = Standing(3, Place("at 3F0 (row 0, step 1)"))
    assert computes.line() == "rank 3 at 3F0 (row 0, step 1), not waiting; open: nothing"
    assert Standing(0, Place()).line() == "rank 0 outside of a step, not waiting; open: nothing"


def test_a_standing_survives_the_way() -> None:
    assert Standing.unpack(TWO.pack()) == TWO
    late = Standing(1, Place("at 1F0 (row 0, step 1)", "nothing", (0, 2)))
    assert Standing.unpack(late.pack()) == late


def test_who_waits_for_a_device_waits_in_no_circle() -> None:
    """Rank 0's bytes are not made yet; it waits for the answer to them."""
    zero = Standing(0, Place("at 0RECV_B0 (row 2, step 3)", "1 send (0SEND_F0 to rank 1 (not begun))", (1,)),
                    "1SEND_B0 of rank 1", 1)  # fmt: skip
    one = Standing(1, Place("at 1RECV_F0 (row 0, step 3)"), "0SEND_F0 of rank 0", 0)
    assert circles(by_rank(zero, one)) == []
    assert graph_text(by_rank(zero, one), 2).splitlines() == [
        "rank 0 waits for 1SEND_B0 of rank 1, which is at 1RECV_F0 (row 0, step 3)",
        "rank 1 waits for 0SEND_F0 of rank 0, which is at 0RECV_B0 (row 2, step 3), and whose device has not come so "
        "far",
    ]
    assert Standing.unpack(Standing(0, Place()).pack()) == Standing(0, Place())


def test_open_requests_are_counted_and_named_up_to_eight() -> None:
    assert open_text([], []) == "nothing"
    assert open_text(["1SEND_F0 of rank 1"], []) == "1 receive (1SEND_F0 of rank 1)"
    names = [f"0SEND_F{k} to rank 1" for k in range(9)]
    assert open_text([], names[:8]) == f"8 sends ({', '.join(names[:8])})"
    assert open_text([], names) == f"9 sends ({', '.join(names[:8])}, ...)"


def test_the_graph_names_the_circle() -> None:
    assert graph_text(by_rank(TWO, ONE, ZERO), 3).splitlines() == [
        "rank 0 waits for rank 1 to take 0SEND_F5; rank 1 is at 1RECV_B1 (row 3, step 4)",
        "rank 1 waits for 2SEND_B1 of rank 2, which is at 2RECV_F3 (row 7, step 4)",
        "rank 2 waits for 1SEND_F3 of rank 1, which is at 1RECV_B1 (row 3, step 4)",
        "they wait in a circle: rank 1 for rank 2, rank 2 for rank 1",
    ]


def test_the_graph_names_who_does_not_answer() -> None:
    assert graph_text(by_rank(TWO, ZERO), 3).splitlines() == [
        "rank 0 waits for rank 1 to take 0SEND_F5; rank 1 does not answer",
        "rank 2 waits for 1SEND_F3 of rank 1, which does not answer",
        "rank 1 does not answer: it computes, or is stuck outside of MPI",
    ]
    assert graph_text(by_rank(ZERO), 4).splitlines()[1:] == [
        "ranks 1, 2, 3 do not answer: they compute, or are stuck outside of MPI"
    ]


def test_a_rank_that_does_not_wait_is_told_as_such() -> None:
    text = graph_text(by_rank(Standing(1, Place("at 1F0 (row 0, step 1)")), waits(0, 1)), 2)
    assert text.splitlines()[1] == "rank 1 does not wait, it is at 1F0 (row 0, step 1)"


@pytest.mark.parametrize(
    "edges, found",
    [
        ({}, []),
        ({0: 1}, []),
        ({0: 1, 1: 2, 2: 3}, []),
        ({0: 1, 1: 0}, [[0, 1]]),
        ({0: 2, 1: 2, 2: 3, 3: 2}, [[2, 3]]),
        ({0: 3, 3: 2, 2: 1, 1: 3}, [[1, 3, 2]]),
        ({0: 1, 1: 0, 2: 3, 3: 4, 4: 2, 5: 4}, [[0, 1], [2, 3, 4]]),
        ({0: -1, 1: 1}, [[1]]),
    ],
)
def test_every_circle_is_found_once(edges: dict[int, int], found: list[list[int]]) -> None:
    assert circles({rank: waits(rank, peer) for rank, peer in edges.items()}) == found


def test_the_report_is_every_line_and_the_graph() -> None:
    found = by_rank(TWO, ZERO)
    assert report_text(found, 3).splitlines() == [
        "where the ranks are:",
        ZERO.line(),
        TWO.line(),
        "who waits for whom:",
        *graph_text(found, 3).splitlines(),
    ]


def test_a_deadlock_in_one_process_has_the_graph_too() -> None:
    def work(transport: Transport) -> None:
        transport.describe_by(lambda look: Place(f"at {transport.rank}B0 (row 1, step 2)"))
        peer = 1 - transport.rank
        what = f"{peer}SEND_F0 of rank {peer}"
        transport.wait(transport.irecv(np.zeros(1, dtype=np.uint8), peer, 0), what)

    with pytest.raises(TransportError) as caught:
        run_ranks(2, work)
    assert caught.value.__notes__[0].splitlines() == [
        "rank 0 waits for 1SEND_F0 of rank 1, which is at 1B0 (row 1, step 2)",
        "rank 1 waits for 0SEND_F0 of rank 0, which is at 0B0 (row 1, step 2)",
        "they wait in a circle: rank 0 for rank 1, rank 1 for rank 0",
    ]


def test_a_rank_knows_its_own_standing() -> None:
    def work(transport: Transport) -> tuple[str, str]:
        before = transport.standing().line()
        transport.describe_by(lambda look: Place("at 0F0 (row 0, step 1)", f"look {look}"))
        return before, transport.standing(look=True).line()

    assert run_ranks(1, work) == [
        (
            "rank 0 outside of a step, not waiting; open: nothing",
            "rank 0 at 0F0 (row 0, step 1), not waiting; open: look True",
        )
    ]
