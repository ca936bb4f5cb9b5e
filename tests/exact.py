"""The shortest makespan by an exact solver (HiGHS): an oracle that shares no code with the search.

Letters: p = number of ranks, m = number of microbatches, s a stage, k a microbatch, t a time. Whole-number durations.
"""

import highspy
import numpy as np


class _Rows:
    """Rows of a linear program, collected."""

    def __init__(self):
        self.upper, self.starts, self.columns, self.values = [], [], [], []

    def at_most(self, terms, upper):
        """The sum of coefficient * column is at most ``upper``."""
        self.starts.append(len(self.columns))
        for column, value in terms:
            self.columns.append(column)
            self.values.append(value)
        self.upper.append(upper)


def is_possible(horizon, *, placement, m, durations, latency=0, caps=None, split=True, in_order=True):
    """Whether a schedule of at most ``horizon`` exists; None if the solver does not say.

    ``durations[s]`` = (F, I, W). Column (a, t) is 1 when action a has begun by time t. ``in_order``: microbatches in
    order in each of F, I and W of a stage, which loses nothing as they are alike, and spares the solver the symmetry.
    """
    stages, p = len(placement), max(placement) + 1
    kinds = 3 if split else 2
    lengths = [list(one) if split else [one[0], one[1] + one[2]] for one in durations]
    actions = [(s, kind, k) for s in range(stages) for kind in range(kinds) for k in range(m)]
    column = {(a, t): i * horizon + t for i, a in enumerate(actions) for t in range(horizon)}

    def length(a):
        return lengths[a[0]][a[1]]

    def begun(a, t, sign):
        return [(column[a, min(t, horizon - 1)], sign)] if t >= 0 else []

    lower, rows = np.zeros(len(column)), _Rows()
    for a in actions:
        if length(a) > horizon:
            return False
        lower[column[a, horizon - length(a)] : column[a, horizon - 1] + 1] = 1
        for t in range(1, horizon):
            rows.at_most(begun(a, t - 1, 1) + begun(a, t, -1), 0)
        for other, lag in _before(a, stages, placement, latency, in_order):
            for t in range(horizon):
                rows.at_most(begun(a, t, 1) + begun(other, t - length(other) - lag, -1), 0)
    for rank in range(p):
        mine = [a for a in actions if placement[a[0]] == rank]
        for t in range(horizon):
            rows.at_most([term for a in mine for term in begun(a, t, 1) + begun(a, t - length(a), -1)], 1)
            if caps is not None:
                made = [term for a in mine if a[1] == 0 for term in begun(a, t, 1)]
                gone = [term for a in mine if a[1] == kinds - 1 for term in begun(a, t - length(a), -1)]
                rows.at_most(made + gone, caps[rank])
    return _solve(len(column), lower, rows)


def _before(a, stages, placement, latency, in_order):
    s, kind, k = a
    if kind == 0 and s:
        yield (s - 1, 0, k), latency * (placement[s] != placement[s - 1])
    if kind == 1 and s < stages - 1:
        yield (s + 1, 1, k), latency * (placement[s] != placement[s + 1])
    if kind:
        yield (s, kind - 1, k), 0
    if k and in_order:
        yield (s, kind, k - 1), 0


def _solve(count, lower, rows):
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("time_limit", 60.0)
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = count, len(rows.upper)
    program.col_cost_, program.col_lower_, program.col_upper_ = np.zeros(count), lower, np.ones(count)
    program.row_lower_ = np.full(len(rows.upper), -highspy.kHighsInf)
    program.row_upper_ = np.array(rows.upper, dtype=float)
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.start_ = np.array([*rows.starts, len(rows.columns)])
    program.a_matrix_.index_ = np.array(rows.columns)
    program.a_matrix_.value_ = np.array(rows.values, dtype=float)
    program.integrality_ = [highspy.HighsVarType.kInteger] * count
    solver.passModel(program)
    solver.run()
    status = solver.getModelStatus()
    return {highspy.HighsModelStatus.kOptimal: True, highspy.HighsModelStatus.kInfeasible: False}.get(status)
