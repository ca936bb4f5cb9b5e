"""v-half and v-min: the published waits and peaks, met or beaten, and legal tables for every p and m."""

import numpy as np
import pytest

from mpipipe.errors import ScheduleError
from mpipipe.schedule import Costs, build, draw_text, find_problems, formulas_v, lower, simulate, strip
from mpipipe.schedule.families.v_shape import v_half, v_min

PICTURES = {
    v_half: (
        "v-half",
        """
rank 0 | 0F0 0F1 0F2 .   .   5F0 5I0 5W0 .   .   5F1 5I1 0I0 5W1 0W0 5F2 5I2 0I1 5W2 0W1 .   0I2 0W2
rank 1 | .   1F0 1F1 1F2 4F0 .   .   4I0 4W0 4F1 .   1I0 4I1 1W0 4F2 4W1 1I1 4I2 1W1 4W2 1I2 1W2 .
rank 2 | .   .   2F0 3F0 2F1 3F1 .   .   3I0 3W0 2I0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2 .
""",
    ),
    v_min: (
        "v-min",
        """
rank 0 | 0F0 0F1 0F2 .   .   5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0 .   .   5F2 5I2 0I1 0W1 5W2 .   0I2 0W2
rank 1 | .   1F0 1F1 .   4F0 .   4F1 4I0 4W0 1F2 1I0 4I1 1W0 4W1 4F2 .   1I1 4I2 1W1 4W2 1I2 1W2 .
rank 2 | .   .   2F0 3F0 2F1 3F1 .   .   3I0 2I0 3W0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2 .
""",
    ),
}
FORMS = {
    "v-half": (formulas_v.wait_v_half, formulas_v.peak_activations_v_half),
    "v-min": (formulas_v.wait_v_min, formulas_v.peak_activations_v_min),
}
# Waits (makespan less the work of a rank) at f = i = w and m = 4p that were seen of another generator, p = 2..8.
SEEN = {"v-half": [1, 5, 5, 11, 11, 17, 17], "v-min": [3, 5, 11, 15, 17, 23, 27]}
OURS = {"v-half": [1, 5, 5, 11, 11, 17, 17], "v-min": [1, 5, 11, 13, 17, 23, 25]}


@pytest.mark.parametrize("generator", PICTURES, ids=lambda generator: generator.__name__)
def test_the_picture_in_the_docstring_is_the_table(generator):
    name, picture = PICTURES[generator]
    drawn = draw_text(build(name, p=3, m=3)).splitlines()
    assert drawn == picture.strip().splitlines()
    assert [line.strip() for line in generator.__doc__.splitlines() if " | " in line] == drawn


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("p", range(2, 9))
def test_waits_and_peaks_for_four_microbatches_per_rank(name, p):
    done = simulate(build(name, p=p, m=4 * p))
    wait = done.makespan - done.busy.max()
    assert wait == OURS[name][p - 2] <= SEEN[name][p - 2]
    assert done.peak_activations.max() == FORMS[name][1](p)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 9])
def test_every_m_is_legal_ordered_and_within_the_peak(name, p):
    wait_of, peak_of = FORMS[name]
    for m in {*range(1, p + 3), 2 * p + 1, 5 * p}:
        table = build(name, p=p, m=m)
        assert find_problems(table) == []
        assert table.ordered
        assert np.bincount(table.kinds, minlength=4).tolist() == [2 * p * m, 0, 2 * p * m, 2 * p * m]
        lowered = lower(table)
        assert find_problems(lowered) == []
        assert strip(lowered) == table
        done = simulate(table)
        assert done.messages == formulas_v.messages_zigzag(p, 2, m)
        assert done.peak_activations.max() <= peak_of(p)
        assert wait_of(p, m) == (done.makespan - 6 * m if m >= p else None)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("p", [11, 16, 24])
def test_closed_forms_for_more_ranks(name, p):
    wait_of, peak_of = FORMS[name]
    done = simulate(build(name, p=p, m=2 * p))
    assert done.makespan - 12 * p == wait_of(p, 2 * p)
    assert done.peak_activations.max() == peak_of(p)


def test_other_costs_wait_longer_with_more_microbatches():
    waits = []
    for m in (16, 32, 64):
        done = simulate(build("v-min", p=8, m=m), Costs(2, 3, 2))
        waits.append(float(done.makespan - done.busy.max()))
    assert waits == sorted(set(waits))
    assert waits[1] <= 190


def test_sixty_four_ranks():
    done = simulate(build("v-half", p=64, m=80))
    assert done.makespan - done.busy.max() == 3 * 64 - 7
    assert done.peak_activations.max() == 66


@pytest.mark.parametrize("name", FORMS)
def test_one_chunk_is_refused(name):
    with pytest.raises(ScheduleError, match=rf"'{name}' has 2 chunks per rank.*pipeline\.chunks = 2"):
        build(name, p=4, v=1, m=8)
