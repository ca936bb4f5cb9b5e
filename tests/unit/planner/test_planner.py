"""Plans from a config alone, and the advice, against hand-computed figures."""

import json

import pytest

from mpipipe.config import Config
from mpipipe.errors import PartitionError, ScheduleError
from mpipipe.planner import advice, plan


def config(**changes):
    tables = {
        "model": {"layers": 8, "hidden": 64, "heads": 4, "sequence": 128, "vocab": 256},
        "batch": {"sequences": 16, "microbatch": 2},
        "pipeline": {"partition": "even"},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        tables[section][name] = value
    return Config.from_tables(tables)


def test_plan_of_four_ranks():
    report = plan(config(), 4)
    assert (report.schedule, report.num_ranks, report.chunks_per_rank, report.num_microbatches) == ("1f1b", 4, 1, 8)
    assert report.partition.sizes == (2, 2, 2, 2)
    assert report.partition.names[report.partition.bounds[0][0]] == "embedding"
    assert report.peak_activations == (4, 3, 2, 1)
    assert report.lower_bound <= report.makespan
    # embedding and head on the end stages make them dearer: more waiting than with equal stages
    assert 3 / 11 < report.bubble_fraction < 0.5
    assert len(report.advice) == 1


def test_costs_are_forwards_of_an_average_stage():
    costs = plan(config(), 4).costs
    assert sum(costs.F) == pytest.approx(4, rel=1e-12)
    assert costs.I == costs.W == pytest.approx(costs.F, rel=1e-12)
    assert costs.F[1] == costs.F[2] < costs.F[0] < costs.F[3]


def test_a_model_without_much_of_a_head_has_nearly_the_formulas_makespan():
    report = plan(config(model__vocab=1), 4)
    assert report.makespan == pytest.approx((8 + 3) * 3, rel=0.01)
    assert report.bubble_fraction == pytest.approx(3 / 11, abs=0.005)


def test_more_microbatches_and_more_chunks_wait_less():
    few = plan(config(), 2).bubble_fraction
    assert plan(config(batch__sequences=64), 2).bubble_fraction < few
    interleaved = plan(config(pipeline__schedule="interleaved", pipeline__chunks=2), 4)
    assert interleaved.partition.sizes == (1,) * 8
    assert interleaved.placement == (0, 1, 2, 3) * 2
    assert interleaved.peak_activations == (11, 9, 7, 5)


def test_one_rank_has_no_bubble_and_no_advice():
    report = plan(config(), 1)
    assert report.bubble_fraction == pytest.approx(0, abs=1e-12)
    assert report.makespan == pytest.approx(8 * 3, rel=1e-12)
    assert report.advice == ()


def test_the_split_by_cost_is_never_worse():
    big_head = {"model__vocab": 4096}
    even, cost = plan(config(**big_head), 4), plan(config(**big_head, pipeline__partition="cost"), 4)
    assert cost.partition.sizes[-1] < 2
    assert cost.makespan < even.makespan


def test_text_and_figures():
    report = plan(config(), 4)
    text = str(report)
    assert "schedule 1f1b: 4 ranks, 1 chunk a rank, 8 microbatches a step" in text
    assert "stage 3: layers blocks.6 .. head" in text
    assert "the same as a list: pipeline.partition = [2, 2, 2, 2]" in text
    assert "by rank: 4 3 2 1" in text
    found = json.loads(json.dumps(report.figures()))
    assert found["partition"] == [2, 2, 2, 2]
    assert found["stages"][0]["layers"] == ["embedding", "blocks.0", "blocks.1"]
    assert sum(stage["cost_share"] for stage in found["stages"]) == pytest.approx(1)
    assert found["microbatches"] == 8
    assert found["advice"] == list(report.advice)


def test_what_does_not_fit_is_refused():
    with pytest.raises(PartitionError, match=r"pipeline\.ranks"):
        plan(config(), 9)
    with pytest.raises(ScheduleError, match="did you mean 'gpipe'"):
        plan(config(pipeline__schedule="gpype"), 2)
    with pytest.raises(ScheduleError, match="'interleaved'"):
        plan(config(pipeline__chunks=2), 2)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_advice_below_four_microbatches_a_rank(schedule):
    (line,) = advice(4, 1, 8, schedule)
    assert "8 microbatches on 4 ranks" in line
    assert "bubble fraction is 0.273" in line  # 3/11
    assert "16 microbatches (4 a rank) 0.158" in line  # 3/19
    assert "batch.sequences" in line
    assert "batch.microbatch" in line
    assert advice(4, 1, 15, schedule)
    assert advice(4, 1, 16, schedule) == []
    assert advice(1, 1, 1, schedule) == []


def test_advice_with_chunks_and_with_fewer_microbatches_than_ranks():
    (line,) = advice(4, 2, 8, "interleaved")
    assert "0.158" in line  # 3/19
    assert "0.086" in line  # 3/35
    assert advice(4, 1, 1, "gpipe")[0].startswith("1 microbatch on 4 ranks is few: ")
    (line,) = advice(4, 2, 2, "interleaved")
    assert "0.556" in line  # 5/9
    with pytest.raises(ScheduleError, match="unknown"):
        advice(4, 1, 8, "xyzzy")


def test_advice_against_naive():
    (line,) = advice(4, 1, 100, "naive")
    assert "0.750 whatever the batch" in line
    assert "'1f1b' has 0.029" in line  # 3/103
    assert "'interleaved'" in advice(4, 2, 100, "naive")[0]
