"""The four families over a grid of p, v, m: legal, complete, ordered, and drawn as their docstrings say."""

import numpy as np
import pytest

from mpipipe.errors import ScheduleError
from mpipipe.schedule import Kind, ScheduleTable, build, draw_text, find_problems, forward_only, lower, strip
from mpipipe.schedule.families.gpipe import gpipe
from mpipipe.schedule.families.interleaved import group_sizes, interleaved
from mpipipe.schedule.families.naive import naive
from mpipipe.schedule.families.one_f_one_b import one_f_one_b


def words(text):
    return text.split()

PICTURES = {
    naive: (
        ("naive", 3, 1, 2),
        """
        rank 0 | F0 .  .  .  .  .  .  B0--- F1 .  .  .  .  .  .  B1---
        rank 1 | .  F0 .  .  .  B0--- .  .  .  F1 .  .  .  B1--- .  .
        rank 2 | .  .  F0 B0--- .  .  .  .  .  .  F1 B1--- .  .  .  .
        """,
    ),
    gpipe: (
        ("gpipe", 3, 1, 4),
        """
        rank 0 | F0 F1 F2 F3 .  .  .  .  .  .  B0--- B1--- B2--- B3---
        rank 1 | .  F0 F1 F2 F3 .  .  .  B0--- B1--- B2--- B3--- .  .
        rank 2 | .  .  F0 F1 F2 F3 B0--- B1--- B2--- B3--- .  .  .  .
        """,
    ),
    one_f_one_b: (
        ("1f1b", 3, 1, 4),
        """
        rank 0 | F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
        rank 1 | .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .
        rank 2 | .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .
        """,
    ),
    interleaved: (
        ("interleaved", 2, 2, 2),
        """
        rank 0 | 0F0 0F1 2F0 2F1 .   .   2B0---- .   2B1---- 0B0---- 0B1----
        rank 1 | .   1F0 1F1 3F0 3B0---- 3F1 3B1---- 1B0---- 1B1---- .   .
        """,
    ),
}
FORWARD_ONLY = """
        rank 0 | F0 F1 F2 F3 .  .
        rank 1 | .  F0 F1 F2 F3 .
        rank 2 | .  .  F0 F1 F2 F3
"""


def lines(text):
    return [line.strip() for line in text.strip().splitlines()]


@pytest.mark.parametrize("generator", PICTURES, ids=lambda generator: generator.__name__)
def test_the_picture_in_the_docstring_is_the_table(generator):
    (name, p, v, m), picture = PICTURES[generator]
    table = build(name, p=p, v=v, m=m)
    assert draw_text(table).splitlines() == lines(picture) == str(table).splitlines()
    assert [line.strip() for line in generator.__doc__.splitlines() if " | " in line] == lines(picture)


def test_the_picture_of_forward_only():
    table = forward_only((0, 1, 2), 3, 1, 4)
    assert draw_text(table).splitlines() == lines(FORWARD_ONLY)
    assert [line.strip() for line in forward_only.__doc__.splitlines() if " | " in line] == lines(FORWARD_ONLY)


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
def test_every_m_is_legal_complete_and_ordered(name, v, p):
    if name == "1f1b" and v > 1:
        return
    for m in range(1, 10):
        table = build(name, p=p, v=v, m=m)
        assert find_problems(table) == []
        assert table.ordered
        counts = np.bincount(table.kinds, minlength=4).tolist()
        assert counts == [p * v * m, p * v * m, 0, 0]
        assert np.diff(table.offsets).tolist() == [2 * v * m] * p
        assert table.placement == tuple(s % p for s in range(p * v))
        lowered = lower(table)
        assert find_problems(lowered) == []
        assert strip(lowered) == table


def test_one_f_one_b_rows():
    assert build("1f1b", p=3, m=4).rows() == [
        words("0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"),
        words("1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"),
        words("2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"),
    ]
    assert build("1f1b", p=4, m=2).rows()[0] == words("0F0 0F1 0B0 0B1")


def test_gpipe_with_two_chunks_goes_through_them_and_back():
    assert build("gpipe", p=2, v=2, m=2).rows()[1] == words("1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1")


def test_naive_with_two_chunks_does_one_microbatch_at_a_time():
    assert build("naive", p=2, v=2, m=2).rows()[0] == words("0F0 2F0 2B0 0B0 0F1 2F1 2B1 0B1")


def test_interleaved_with_one_chunk_is_1f1b():
    for p in range(1, 6):
        for m in range(1, 12):
            assert build("interleaved", p=p, m=m) == build("1f1b", p=p, m=m)


@pytest.mark.parametrize("p,m,sizes", [(4, 8, [4, 4]), (4, 11, [6, 5]), (4, 14, [5, 5, 4]), (1, 2, [1] * 2)])
def test_groups_differ_by_at_most_one_the_larger_first(p, m, sizes):
    assert group_sizes(p, m) == sizes


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("v", [2, 3])
def test_interleaved_is_torchs_where_torch_allows_it(p, v):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    compared = 0
    for m in range(1, 3 * p + 4):
        rounds = max(1, m // p)
        if m % rounds:
            continue
        size = m // rounds
        rows = build("interleaved", p=p, v=v, m=m).rows()
        for rank in range(p):
            theirs = torch_rank(schedules, p, v, m, size, rank)
            assert rows[rank] == theirs, (m, rank)
            compared += 1
    assert compared >= 2 * p


def torch_rank(schedules, p, v, m, size, rank):
    """torch's own order for one rank, as ScheduleInterleaved1F1B computes it, without stages or a process group."""
    stub = object.__new__(schedules.ScheduleInterleaved1F1B)
    stub.n_local_stages, stub.microbatches_per_round, stub.pp_group_size, stub._n_microbatches = v, size, p, m
    return [str(action) for action in stub._calculate_single_rank_operations(rank) if action is not None]


def test_refusals_name_keys_and_the_way_out():
    with pytest.raises(ScheduleError, match=r"pipeline\.schedule = '1f1b'.*pipeline\.chunks = 2.*'interleaved'"):
        build("1f1b", p=4, v=2, m=8)
    with pytest.raises(ScheduleError, match=r"'interleave' is unknown; did you mean 'interleaved'\?"):
        build("interleave", p=4, m=8)
    with pytest.raises(ScheduleError, match="allowed: naive, gpipe, 1f1b, eager-1f1b, interleaved"):
        build("xyzzy", p=4, m=8)
    with pytest.raises(ScheduleError, match=r"pipeline\.ranks = 0 "):
        build("gpipe", p=0, m=8)
    with pytest.raises(ScheduleError, match=r"pipeline\.chunks = 1.5 "):
        build("gpipe", p=2, v=1.5, m=8)
    with pytest.raises(ScheduleError, match=r"batch\.sequences and batch\.microbatch, = -3"):
        build("gpipe", p=2, m=-3)
    with pytest.raises(ScheduleError, match="40000 stages"):
        build("gpipe", p=20000, v=2, m=1)


def test_forward_only_takes_any_placement():
    table = forward_only((0, 1, 1, 0), 2, 2, 3)
    assert table.rows() == [words("0F0 0F1 0F2 3F0 3F1 3F2"), words("1F0 1F1 1F2 2F0 2F1 2F2")]
    assert find_problems(table) == []
    assert table.forward_only
    assert not build("naive", p=2, m=1).forward_only


def test_lower_puts_receives_before_their_use_and_sends_after_their_make():
    table = lower(build("1f1b", p=2, m=2))
    assert table.rows() == [
        words("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"),
        words("1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"),
    ]
    assert table.lowered
    assert lower(table) is table


def test_lower_sends_the_gradient_after_i_and_nothing_after_w():
    table = ScheduleTable.from_rows([["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]])
    assert lower(table).rows() == [words("0F0 0SEND_F0 0RECV_B0 0I0 0W0"), words("1RECV_F0 1F0 1I0 1SEND_B0 1W0")]


def test_lower_leaves_out_hops_inside_a_rank():
    table = ScheduleTable.from_rows([words("0F0 3F0 3B0 0B0"), words("1F0 2F0 2B0 1B0")])
    assert table.placement == (0, 1, 1, 0)
    assert lower(table).rows()[1] == words("1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0")


@pytest.mark.parametrize("name,v", [("naive", 2), ("gpipe", 3), ("1f1b", 1), ("interleaved", 2)])
def test_lower_counts(name, v):
    for p in range(1, 5):
        for m in (1, 3, 8):
            lowered = lower(build(name, p=p, v=v, m=m))
            crossings = m * (p * v - 1) if p > 1 else 0
            for kind in (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B):
                assert np.count_nonzero(lowered.kinds == kind) == crossings


@pytest.mark.parametrize(
    ("name", "p", "v", "m", "said"),
    [
        ("1f1b", 4000, 1, 1_000_000, r"12,000,000,000 actions.* at most 200,000,000: take m = 16666 or less"),
        ("gpipe", 1, 1, 10**9, "pipeline.ranks = 1, pipeline.chunks = 1 and m = 1000000000"),
        ("interleaved", 16, 8, 10**6, "384,000,000 actions"),
        ("v-half", 8, 2, 10**6, r"at most 20,000,000: take m = 416666 or less"),
    ],
)
def test_a_table_that_no_machine_holds_is_refused_before_it_is_made(name, p, v, m, said):
    with pytest.raises(ScheduleError, match=said):
        build(name, p=p, v=v, m=m)


def test_the_name_auto_is_explained():
    with pytest.raises(ScheduleError, match=r"'auto' lets a run and 'mpipipe plan' choose.*'mpipipe schedule search'"):
        build("auto", p=2, m=2)


@pytest.mark.parametrize(("name", "near"), [("1f1bb", "1f1b"), ("ZB-H1", "zb-h1"), ("interleave", "interleaved")])
def test_a_near_name_is_offered(name, near):
    with pytest.raises(ScheduleError, match=f"did you mean '{near}'"):
        build(name, p=2, m=2)


@pytest.mark.parametrize("name", ["foo", "pipeline", "x1", ""])
def test_a_name_far_from_all_gets_no_offer(name):
    with pytest.raises(ScheduleError, match="is unknown \\(allowed") as error:
        build(name, p=2, m=2)
    assert "did you mean" not in str(error.value)
