"""Message sizes that are hard for an MPI library: below its eager limit with the limit at 0, in several pieces, beyond
2 GiB, of two bytes an element. Every run has the bits of one rank.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from launch import REPOSITORY, launch, mpirun

pytestmark = pytest.mark.mpi

SIZES = REPOSITORY / "tests" / "mpi" / "sizes.py"
OPEN_MPI = "--oversubscribe" in mpirun()

NUM_CHECKS = 9
"""Those of sizes.py but for the ones of the protocol."""

NEEDED_GIB = 8.0
"""For two ranks with 2 GiB each, and what others do meanwhile."""


@dataclass(frozen=True)
class Setting:
    """An environment for ``ranks`` ranks, with the words for sizes.py: what the library then does with which sizes."""

    ranks: int
    words: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)


SYNCHRONOUS = ("synchronous", "rendezvous:0", "rendezvous:1")
"""No send is complete before its receive has begun: no library has a lower eager limit."""

MPICH_SETTINGS = {
    "every send synchronous": Setting(2, SYNCHRONOUS),
    "shared memory, eager limit 0": Setting(
        2, ("rendezvous:1", "rendezvous:128"), {"MPIR_CVAR_CH4_IPC_CMA_P2P_THRESHOLD": "0"}
    ),
    "UCX, eager limit 0": Setting(
        3, ("rendezvous:0", "rendezvous:1"), {"MPIR_CVAR_NOLOCAL": "1", "UCX_RNDV_THRESH": "0"}
    ),
    "UCX over TCP": Setting(2, ("eager:1", "eager:4096"), {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self"}),
}
OPEN_MPI_SETTINGS = {
    "every send synchronous": Setting(2, SYNCHRONOUS),
    "shared memory, lowest eager limit": Setting(
        2,
        ("eager:1", "rendezvous:512"),
        {"OMPI_MCA_btl_sm_eager_limit": "80", "OMPI_MCA_btl_sm_rndv_eager_limit": "80"},
    ),
    "TCP, lowest eager limit": Setting(
        3,
        ("rendezvous:1", "rendezvous:128"),
        {
            "OMPI_MCA_btl": "self,tcp",
            "OMPI_MCA_btl_tcp_eager_limit": "80",
            "OMPI_MCA_btl_tcp_rndv_eager_limit": "80",
        },
    ),
}
"""Open MPI refuses a limit below 80 bytes, its own header included."""

SETTINGS = OPEN_MPI_SETTINGS if OPEN_MPI else MPICH_SETTINGS


def run(ranks: int, *words: str, **env: str) -> list[str]:
    """The names of the checks that sizes.py did; none went wrong."""
    ended = launch(ranks, SIZES, *words, **env)
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    wrong = [f"{line['check']}\n{line['error']}" for line in lines if not line["ok"]]
    assert not wrong, "\n".join(wrong)
    assert ended.returncode == 0, ended.stderr
    return [line["check"] for line in lines]


def other_processes_may_be_read() -> bool:
    """MPICH sends straight from a process's memory only where the system lets it."""
    path = Path("/proc/sys/kernel/yama/ptrace_scope")
    return not path.exists() or path.read_text().strip() == "0"


@pytest.mark.parametrize("name", SETTINGS)
def test_training_under_a_protocol(name: str) -> None:
    if "MPIR_CVAR_CH4_IPC_CMA_P2P_THRESHOLD" in SETTINGS[name].env and not other_processes_may_be_read():
        pytest.skip("ptrace_scope forbids to read other processes' memory: MPICH's eager limit can't be 0 here")
    setting = SETTINGS[name]
    done = run(setting.ranks, *setting.words, **setting.env)
    assert len(done) == NUM_CHECKS + len([word for word in setting.words if ":" in word])


@pytest.mark.slow
def test_a_message_beyond_two_gibibytes() -> None:
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    gib = int(available.split()[1]) / 2**20
    if gib < NEEDED_GIB:
        pytest.skip(f"{gib:.1f} GiB of memory are free, {NEEDED_GIB:g} are needed")
    assert run(2, "big") == ["a big message"]
