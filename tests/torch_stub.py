"""What torch's pipeline schedules ask of a stage, without a process group: enough to have them draw their tables."""

from __future__ import annotations

from types import SimpleNamespace


def stage(index: int, p: int, num_stages: int) -> SimpleNamespace:
    """Stage ``index`` of ``num_stages`` on rank 0 of ``p``."""
    return SimpleNamespace(
        stage_index=index,
        num_stages=num_stages,
        group_size=p,
        group_rank=0,
        group=None,
        submod=None,
        is_first=index == 0,
        is_last=index == num_stages - 1,
        has_backward=True,
    )
