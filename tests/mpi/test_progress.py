"""MPI moves long messages only inside its calls: a rank that computes keeps its receiver waiting, unless it polls."""

from __future__ import annotations

import json
import statistics

import pytest
from launch import REPOSITORY, launch

pytestmark = pytest.mark.mpi

SCRIPT = REPOSITORY / "tests" / "mpi" / "computing.py"
COMPUTES_S = 0.8
PATHS = {
    "tcp": {"UCX_TLS": "tcp,self", "MPIR_CVAR_NOLOCAL": "1", "OMPI_MCA_btl": "self,tcp"},
    "memory": {"MPIR_CVAR_CH4_CMA_ENABLE": "0", "OMPI_MCA_smsc": "^cma"},
}
"""Ways on which no rank can read another one's memory: as between two nodes, and as in a container that forbids it.
MPICH and Open MPI each read their own of these variables.
"""


@pytest.mark.parametrize("path, nbytes", [("tcp", 1 << 20), ("tcp", 4 << 20), ("memory", 1 << 20)])
def test_polls_bring_a_message_while_its_sender_computes(path: str, nbytes: int) -> None:
    ended = launch(2, SCRIPT, str(nbytes), str(COMPUTES_S), timeout=60, **PATHS[path])
    assert ended.returncode == 0, ended.stderr
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("{"))
    found = {way: statistics.median(seconds) for way, seconds in json.loads(line).items()}
    assert found["plain"] > 0.9 * COMPUTES_S, line
    assert found["polled"] < 0.5 * found["plain"], line
