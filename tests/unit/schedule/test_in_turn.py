"""1F1B with a longer warm-up, interleaved in groups, looped-bfs: their rules, options, refusals and speed."""

import time

import numpy as np
import pytest

from mpipipe.errors import ScheduleError
from mpipipe.schedule import Costs, ScheduleTable, build, draw_text, find_problems, formulas, lower, simulate, strip
from mpipipe.schedule.families.eager import eager_1f1b
from mpipipe.schedule.families.interleaved import group_sizes
from mpipipe.schedule.families.looped_bfs import looped_bfs

PICTURES = {
    eager_1f1b: (
        ("eager-1f1b", 3, 1, 4),
        """
        rank 0 | F0 F1 F2 F3 .  .  .  B0--- .  B1--- .  B2--- .  B3---
        rank 1 | .  F0 F1 F2 .  B0--- F3 B1--- .  B2--- .  B3--- .  .
        rank 2 | .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .
        """,
    ),
    looped_bfs: (
        ("looped-bfs", 2, 2, 2),
        """
        rank 0 | 0F0 0F1 2F0 2F1 .   .   .   2B0---- 2B1---- 0B0---- 0B1----
        rank 1 | .   1F0 1F1 3F0 3F1 3B0---- 3B1---- 1B0---- 1B1---- .   .
        """,
    ),
}


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
@pytest.mark.parametrize(
    "name, chunks",
    [
        ("eager-1f1b", (1,)),
        ("eager-1f1b:per_hop=5", (1,)),
        ("1f1b:warmup=1", (1,)),
        ("looped-bfs", (1, 2, 3)),
        ("interleaved", (1, 2, 3, 4)),
    ],
)
def test_every_m_is_legal_complete_and_ordered(name, chunks, p):
    for v in chunks:
        for m in range(1, 21):
            table = build(name, p=p, v=v, m=m)
            assert find_problems(table) == []
            assert table.ordered
            assert table.name == name
            assert table.placement == tuple(s % p for s in range(p * v))
            assert np.diff(table.offsets).tolist() == [2 * v * m] * p
            if m % 7 == 0:
                assert strip(lower(table)) == table
                assert simulate(table).messages == formulas.messages(p, v, m)


def test_eager_rows():
    assert build("eager-1f1b", p=3, m=6).rows() == [
        words("0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5"),
        words("1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5"),
        words("2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5"),
    ]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("m", [1, 3, 9])
def test_the_ends_of_the_warm_up_option(p, m):
    one, eager = build("1f1b", p=p, m=m), build("eager-1f1b", p=p, m=m)
    assert build("1f1b:warmup=0", p=p, m=m) == one == build("eager-1f1b:per_hop=1", p=p, m=m)
    for more in (p - 1, p, 1000):
        assert build(f"1f1b:warmup={more}", p=p, m=m) == eager
    assert build("eager-1f1b:per_hop=2", p=p, m=m) == eager


def test_a_longer_warm_up_waits_less_for_messages():
    """p=4, m=16, F = I = W = 2, latency 1."""
    names = ["1f1b", "1f1b:warmup=1", "1f1b:warmup=2", "1f1b:warmup=3", "eager-1f1b"]
    found = [simulate(build(name, p=4, m=16), Costs(2, 2, 2), 1).makespan for name in names]
    assert found == [142, 132, 122, 120, 120]
    peaks = [formulas.peak_activations(name, 4, 1, 16) for name in names]
    assert peaks == [(4, 3, 2, 1), (5, 4, 3, 1), (6, 5, 3, 1), (7, 5, 3, 1), (7, 5, 3, 1)]


def test_looped_bfs_is_gpipe_with_chunks():
    for p in range(1, 6):
        for v in (1, 2, 3):
            for m in (1, 2, 5, 8):
                assert build("looped-bfs", p=p, v=v, m=m) == build("gpipe", p=p, v=v, m=m)


@pytest.mark.parametrize("costs", [Costs(), Costs(2, 3, 1), Costs(1, 4, 4)])
def test_looped_bfs_has_the_makespan_of_the_papers_last_in_first_out_backward(costs):
    for p in range(1, 6):
        for v in (1, 2, 3):
            for m in (1, 2, 3, 5, 8):
                table = build("looped-bfs", p=p, v=v, m=m)
                forwards = v * m
                halves = [(row[:forwards], row[:forwards][::-1]) for row in table.rows()]
                rows = [there + [text.replace("F", "B") for text in back] for there, back in halves]
                papers = ScheduleTable.from_rows(rows, v=v, m=m, placement=table.placement)
                assert find_problems(papers) == []
                assert papers.ordered == (m == 1)
                assert simulate(papers, costs).makespan == simulate(table, costs).makespan


# --- groups ---


@pytest.mark.parametrize(
    "p, m, group, sizes", [(4, 8, 4, [4, 4]), (4, 13, 4, [4, 4, 4, 1]), (4, 10, 6, [6, 4]), (2, 5, 9, [5])]
)
def test_groups_of_a_given_size(p, m, group, sizes):
    assert group_sizes(p, m, group) == sizes


def test_interleaved_in_a_larger_group():
    assert build("interleaved:group=4", p=2, v=2, m=4).rows() == [
        words("0F0 0F1 0F2 0F3 2F0 2F1 2F2 2B0 2F3 2B1 2B2 2B3 0B0 0B1 0B2 0B3"),
        words("1F0 1F1 1F2 1F3 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 1B0 1B1 1B2 1B3"),
    ]


@pytest.mark.parametrize("name", ["interleaved", "interleaved-zb"])
def test_every_group_that_is_allowed_is_legal_and_every_other_names_one_that_is(name):
    refused = 0
    for p in range(1, 6):
        for v in (2, 3):
            for m in range(1, 15):
                for group in range(1, m + 3):
                    rest = m % group
                    if group >= m or (group >= p and (rest == 0 or rest >= p)):
                        table = build(f"{name}:group={group}", p=p, v=v, m=m)
                        assert find_problems(table) == []
                        assert table.ordered
                        continue
                    refused += 1
                    with pytest.raises(ScheduleError, match="nearest allowed: ") as caught:
                        build(f"{name}:group={group}", p=p, v=v, m=m)
                    said = str(caught.value).split("nearest allowed: ")[1].split(" or ")
                    for option in said:
                        build(f"{name}:{option}", p=p, v=v, m=m)
    assert refused > 100


def test_what_a_group_is_refused_for():
    with pytest.raises(ScheduleError) as caught:
        build("interleaved:group=6", p=4, v=2, m=9)
    assert str(caught.value) == (
        "pipeline.schedule = 'interleaved:group=6' with pipeline.ranks = 4 and m = 9 microbatches: every group, the "
        "last one too, needs at least 4 of them; nearest allowed: group=5 or group=9"
    )
    with pytest.raises(ScheduleError, match="group must be a whole number, 1 or more"):
        build("interleaved:group=0", p=4, v=2, m=9)


def test_one_chunk_has_no_groups():
    for group in (1, 3, 50):
        assert build(f"interleaved:group={group}", p=4, v=1, m=9) == build("1f1b", p=4, m=9)


def test_the_default_groups_are_those_of_megatron_where_m_is_a_multiple_of_p():
    for p in (2, 3, 4):
        for rounds in (1, 2, 3):
            m = p * rounds
            assert build(f"interleaved:group={p}", p=p, v=2, m=m) == build("interleaved", p=p, v=2, m=m)


# --- others ---


@pytest.mark.parametrize("name", ["eager-1f1b", "1f1b"])
def test_several_chunks_are_refused(name):
    with pytest.raises(ScheduleError, match=rf"pipeline\.schedule = '{name}'.*pipeline\.chunks = 2.*'interleaved'"):
        build(name, p=4, v=2, m=8)
    with pytest.raises(ScheduleError, match=f"its options: {name}:"):
        build(f"{name}:group=2", p=4, m=8)


@pytest.mark.parametrize("p, m", [(1, 1), (1, 4), (2, 1), (2, 5), (4, 3), (4, 9), (7, 12)])
def test_1f1b_is_what_torchs_schedule_executes(p, m):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    rows = build("1f1b", p=p, m=m).rows()
    for rank in range(p):
        assert rows[rank] == executed(schedules.Schedule1F1B, p, m, rank)


def executed(schedule, p, m, rank):
    """What torch's Schedule1F1B does on a rank, from a stage that only takes notes. (Its drawn table is another.)"""
    stage = NotingStage(rank)
    stub = object.__new__(schedule)
    stub._stage, stub._num_stages, stub._n_microbatches, stub.scale_grads = stage, p, m, False
    stub._check_inputs = lambda *_: ([()] * m, [{}] * m)
    for name in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
        setattr(stub, name, lambda *_, **__: None)
    stub._step_microbatches()
    return stage.notes


class NotingStage:
    def __init__(self, index):
        self.stage_index, self.notes = index, []

    def forward_one_chunk(self, microbatch, *_, **__):
        self.notes.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch, *_, **__):
        self.notes.append(f"{self.stage_index}B{microbatch}")

    def perform_reduce_grad(self, _):
        pass

    def no_messages(self, _):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_messages


@pytest.mark.parametrize("name, v", [("1f1b", 1), ("eager-1f1b", 1), ("zb-h2", 1), ("interleaved-zb", 4)])
def test_a_table_of_a_million_actions_is_built_at_once(name, v):
    start = time.process_time()
    table = build(name, p=256, v=v, m=2048 // v)
    assert table.num_actions / (time.process_time() - start) > 500_000
