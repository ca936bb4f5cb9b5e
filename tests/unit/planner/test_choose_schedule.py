"""The schedule of ``auto``: executable, no longer than the named ones, the same for the same costs."""

import pytest

from mpipipe.config import Config
from mpipipe.errors import ScheduleError
from mpipipe.partition import describe_gpt2, make_partition
from mpipipe.planner import COST_UNITS, choose_schedule, relative_costs
from mpipipe.schedule import Costs, build, simulate, verify


def costs_of(num_stages):
    config = Config.from_tables({"model": {"layers": 8, "hidden": 64, "heads": 4, "sequence": 128, "vocab": 256}})
    descriptions = describe_gpt2(config.needed_model())
    return relative_costs(descriptions, make_partition(descriptions, num_stages, "even"))


@pytest.mark.parametrize(
    "chunks, names", [(1, ("gpipe", "1f1b", "zb-h1", "zb-h2")), (2, ("interleaved", "zb-v", "v-half"))]
)
def test_no_longer_than_the_named_ones(chunks, names):
    result = choose_schedule(costs_of(4 * chunks), num_ranks=4, chunks_per_rank=chunks, num_microbatches=8)
    verify(result.table)
    assert result.table.ordered
    assert result.table.mirror is None
    assert not result.table.overlaps.size
    assert (result.table.p, result.table.v, result.table.m) == (4, chunks, 8)
    costs = result.simulation.costs
    for name in names:
        assert result.simulation.makespan <= simulate(build(name, p=4, m=8, v=chunks), costs).makespan
    assert result.gap == result.simulation.makespan / result.lower_bound - 1


def test_costs_that_differ_in_the_last_bits_give_the_same_table():
    costs = costs_of(4)
    nearly = Costs(*[[cost * (1 + 1e-12) for cost in row] for row in (costs.F, costs.I, costs.W)])
    chosen = [
        choose_schedule(one, num_ranks=4, chunks_per_rank=1, num_microbatches=8, cap=3).table for one in (costs, nearly)
    ]
    assert chosen[0] == chosen[1]
    assert chosen[0].name == chosen[1].name


def test_even_stages():
    result = choose_schedule(Costs(), num_ranks=4, chunks_per_rank=1, num_microbatches=16, cap=4)
    assert result.found_by == "zb-h1"
    assert result.simulation.makespan == COST_UNITS * (16 * 3 + 3)
    assert result.gap == 0


def test_without_a_split_backward():
    result = choose_schedule(Costs(), num_ranks=4, chunks_per_rank=1, num_microbatches=16, split=False)
    assert result.table == build("1f1b", p=4, m=16)
    assert result.simulation.makespan == COST_UNITS * (16 + 3) * 3
    assert result.gap == 0


def test_one_rank():
    assert choose_schedule(Costs(), num_ranks=1, chunks_per_rank=1, num_microbatches=3).gap == 0


def test_a_cap_that_is_too_small():
    with pytest.raises(ScheduleError, match="cap = 1 on rank 0"):
        choose_schedule(Costs(), num_ranks=2, chunks_per_rank=2, num_microbatches=3, cap=1)
