"""No hang and no other bit for any schedule, ranks, chunks and microbatches, also fewer microbatches than ranks (B09,
B11, B12).

One step each; the last microbatch holds one sequence and the others two; 13 layers go evenly on no number of stages
here but one.
"""

from __future__ import annotations

import functools

import pytest
import tiny

from mpipipe.errors import ConfigError
from mpipipe.schedule import build, names
from mpipipe.transport import run_ranks, solo

pytestmark = pytest.mark.slow

GRID = [
    (schedule, chunks, p, m)
    for schedule in names()
    for chunks in (1, 2, 3)
    for p in (1, 2, 3, 4)
    for m in range(1, 10)
    if tiny.takes(schedule, chunks, p, m) and build(schedule, p=p, v=chunks, m=m).mirror is None
]


def config(m: int, **keys: object) -> tiny.Config:
    return tiny.config(sequences=2 * m - 1, microbatch=min(2, 2 * m - 1), model__layers=13, **keys)


@functools.cache
def reference(m: int) -> tiny.Story:
    return tiny.merge([tiny.run(config(m), solo(), steps=1)])


@pytest.mark.parametrize("schedule, chunks, p, m", GRID)
def test_every_combination_ends_and_equals_one_rank(schedule: str, chunks: int, p: int, m: int) -> None:
    asked = config(m, schedule=schedule, chunks=chunks)
    story = tiny.merge(run_ranks(p, lambda transport: tiny.run(asked, transport, steps=1)))
    assert (story.steps, story.state) == (reference(m).steps, reference(m).state)


@pytest.mark.parametrize(
    "schedule, chunks, p, words",
    [
        ("interleaved", 4, 4, r"pipeline\.chunks.*16 stages.*at most 3 with 4 ranks"),
        ("gpipe", 7, 2, r"pipeline\.chunks.*14 stages.*at most 6 with 2 ranks"),
        ("1f1b", 1, 14, r"pipeline\.ranks.*at most 13"),
    ],
)
def test_more_stages_than_layers_are_refused_on_every_rank(schedule: str, chunks: int, p: int, words: str) -> None:
    asked = config(4, schedule=schedule, chunks=chunks)
    refused = []

    def work(transport: tiny.Transport) -> None:
        with pytest.raises(ConfigError, match=words):
            tiny.trainer(asked, transport)
        refused.append(transport.rank)

    run_ranks(p, work)
    assert sorted(refused) == list(range(p))
