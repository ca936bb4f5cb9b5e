"""How many cores a process and the ranks of its node may keep busy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpipipe import environment
from mpipipe.environment import available_cores, cores_of, cpu_quota, has_core_of_its_own, threads_per_rank


def system(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A root folder with this ``/proc/self/cgroup`` and these files below ``/sys/fs/cgroup``."""
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="ascii")
    return root


@pytest.mark.parametrize(
    "groups, files, quota",
    [
        ("0::/", {}, None),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "200000 100000"}, 2.0),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b", {"a/b/cpu.max": "50000 100000", "a/cpu.max": "150000 100000"}, 0.5),
        ("0::/docker/x", {"cpu.max": "300000 100000"}, 3.0),  # a container that sees its own group at the top
        ("4:cpu,cpuacct:/j\n0::/", {"cpu,cpuacct/j/cpu.cfs_quota_us": "400000"}, None),
        (
            "4:cpu,cpuacct:/j\n0::/",
            {"cpu,cpuacct/j/cpu.cfs_quota_us": "400000", "cpu,cpuacct/j/cpu.cfs_period_us": "100000"},
            4.0,
        ),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("2:memory:/j", {"memory/j/cpu.max": "100000 100000"}, None),
        ("0::/", {"cpu.max": "much more"}, None),
        ("0::/", {"cpu.max": "0 0"}, None),
    ],
)
def test_the_quota_of_a_group(groups: str, files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    assert cpu_quota(system(tmp_path, groups, files)) == quota


def test_no_cgroups_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None


@pytest.mark.parametrize(
    "bindings, quota, cores",
    [
        ([{0, 1}], None, 2),
        ([{0}, {1}, {2}], None, 3),  # bound to a core each
        ([{3}, {3}, {3}, {3}], None, 1),  # all of them bound to the same one
        ([{0, 1}, {1, 2}], None, 3),
        ([set(range(64))] * 4, 2.0, 2),
        ([{0, 1}], 8.0, 2),
        ([{0, 1}], 0.5, 1),
    ],
)
def test_cores_together(
    bindings: list[set[int]], quota: float | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "cpu_quota", lambda: quota)
    assert cores_of(bindings) == cores


def test_a_quota_counts_as_the_cores_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(environment, "cpu_quota", lambda: 2.0)
    assert available_cores() == 2
    assert has_core_of_its_own(2)
    assert not has_core_of_its_own(4)
    assert threads_per_rank(1, environ={}) == 2
    assert threads_per_rank(4, environ={}) == 1
    monkeypatch.setattr(environment, "cpu_quota", lambda: None)
    assert has_core_of_its_own(4)
    assert threads_per_rank(4, environ={}) == 16
