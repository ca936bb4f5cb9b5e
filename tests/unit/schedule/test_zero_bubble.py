"""zb-h1, zb-h2, interleaved-zb: their rules, pictures and refusals, and torch's order."""

import numpy as np
import pytest

from mpipipe.errors import ScheduleError
from mpipipe.schedule import Costs, build, draw_text, find_problems, formulas, lower, simulate, strip
from mpipipe.schedule.families.zero_bubble import interleaved_zb, zb_h1, zb_h2

PICTURES = {
    zb_h1: (
        ("zb-h1", 3, 1, 4),
        """
        rank 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
        """,
    ),
    zb_h2: (
        ("zb-h2", 3, 1, 5),
        """
        rank 0 | F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .  .
        rank 1 | .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 .
        rank 2 | .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
        """,
    ),
    interleaved_zb: (
        ("interleaved-zb", 2, 2, 2),
        """
        rank 0 | 0F0 0F1 2F0 2F1 .   2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
        rank 1 | .   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
        """,
    ),
}
CHUNKS = [("zb-h1", (1,)), ("zb-h1:warmup=1", (1,)), ("zb-h2", (1,)), ("interleaved-zb", (1, 2, 3, 4))]


def words(text):
    return text.split()


def lines(text):
    return [line.strip() for line in text.strip().splitlines()]


@pytest.mark.parametrize("generator", PICTURES, ids=lambda generator: generator.__name__)
def test_the_picture_in_the_docstring_is_the_table(generator):
    (name, p, v, m), picture = PICTURES[generator]
    table = build(name, p=p, v=v, m=m)
    assert draw_text(table).splitlines() == lines(picture)
    assert [line.strip() for line in generator.__doc__.splitlines() if " | " in line] == lines(picture)


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("name, chunks", CHUNKS)
def test_every_m_is_legal_complete_and_ordered(name, chunks, p):
    for v in chunks:
        for m in range(1, 21):
            table = build(name, p=p, v=v, m=m)
            assert find_problems(table) == []
            assert table.ordered
            assert table.name == name
            assert table.placement == tuple(s % p for s in range(p * v))
            assert np.bincount(table.kinds, minlength=4).tolist() == [p * v * m, 0, p * v * m, p * v * m]
            assert np.diff(table.offsets).tolist() == [3 * v * m] * p
            if m % 7 == 0:
                assert strip(lower(table)) == table
                assert simulate(table).messages == formulas.messages(p, v, m)


def test_zb_h1_rows():
    assert build("zb-h1", p=4, m=5).rows()[1] == words("1F0 1F1 1F2 1I0 1F3 1I1 1W0 1F4 1I2 1W1 1I3 1W2 1I4 1W3 1W4")


def test_with_one_rank_every_w_follows_its_i():
    for name in ("zb-h1", "zb-h2", "interleaved-zb"):
        assert build(name, p=1, m=2).rows() == [words("0F0 0I0 0W0 0F1 0I1 0W1")]


@pytest.mark.parametrize("p", [1, 2, 3, 5])
@pytest.mark.parametrize("m", [1, 2, 7, 12])
def test_the_ends_of_the_warm_up_option_and_one_chunk(p, m):
    first, second = build("zb-h1", p=p, m=m), build("zb-h2", p=p, m=m)
    assert build("zb-h1:warmup=0", p=p, m=m) == first == build("interleaved-zb", p=p, v=1, m=m)
    assert build(f"zb-h1:warmup={p - 1}", p=p, m=m) == second == build("zb-h1:warmup=99", p=p, m=m)


@pytest.mark.parametrize("p", range(1, 8))
def test_each_forward_of_the_warm_up_takes_one_from_the_wait_inside_the_span(p):
    for m in (2 * p - 1, 2 * p, 3 * p):
        for warmup in range(p):
            found = simulate(build(f"zb-h1:warmup={warmup}", p=p, m=m), Costs(2, 2, 2))
            assert (found.span - found.busy).max() == (p - 1 - warmup) * 2
            peaks = [min(m, p + min(warmup, p - 1 - r) + min(warmup, r)) for r in range(p)]
            assert found.peak_activations.tolist() == peaks


def test_the_skew_of_zb_h2_is_all_that_is_left():
    found = simulate(build("zb-h2", p=8, m=32))
    assert found.span.tolist() == found.busy.tolist() == [96] * 8
    assert found.makespan == 96 + 7


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
def test_several_chunks_are_refused(name):
    with pytest.raises(ScheduleError, match=rf"pipeline\.schedule = '{name}'.*pipeline\.chunks = 2.*'interleaved-zb'"):
        build(name, p=4, v=2, m=8)


def test_options_that_there_are_not():
    with pytest.raises(ScheduleError, match=r"'group=4' is no option of this schedule \(its options: none\)"):
        build("zb-h2:group=4", p=4, m=8)
    with pytest.raises(ScheduleError, match=r"its options: interleaved-zb:group=K\)"):
        build("interleaved-zb:warmup=4", p=4, m=8)


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("v", [1, 2, 3])
def test_interleaved_zb_is_torchs_where_torch_allows_it(p, v):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    compared = 0
    for m in range(1, 4 * p + 3):
        rounds = max(1, m // p)
        if m % rounds:
            continue
        rows = build("interleaved-zb", p=p, v=v, m=m).rows()
        for rank in range(p):
            assert rows[rank] == torch_rank(schedules, p, v, m, m // rounds, rank), (m, rank)
            compared += 1
    assert compared >= 2 * p


def torch_rank(schedules, p, v, m, size, rank):
    """torch's own order for one rank, as ScheduleInterleavedZeroBubble computes it, without stages or a process
    group."""
    stub = object.__new__(schedules.ScheduleInterleavedZeroBubble)
    stub.n_local_stages, stub.microbatches_per_round, stub.pp_group_size, stub._n_microbatches = v, size, p, m
    return [str(action) for action in stub._calculate_single_rank_operations(rank) if action is not None]
