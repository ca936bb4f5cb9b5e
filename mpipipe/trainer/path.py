"""How messages leave the GPUs of a run: decided once, by rank 0, before the devices are opened; tried at the start."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING

from mpipipe.collectives import agree, on_first_rank
from mpipipe.transport.proof import PROOF_WITHIN_S, MessagePath, choose_path, exchange_pattern, prove

if TYPE_CHECKING:
    from mpipipe.config.sections import CommSection
    from mpipipe.device import Device
    from mpipipe.transport import Transport

_log = logging.getLogger(__name__)


def decide_path(transport: Transport, comm: CommSection, device: str = "cuda") -> MessagePath:
    """The path of a run whose ranks compute on GPUs, for ``comm.path``. Collective: the same on all ranks. Rank 0 says
    it in its log. To be called before a device is opened: two more processes may open it for some seconds.
    """
    if transport.size == 1:
        return MessagePath("staged", "one rank sends no messages")

    def choose() -> dict[str, str]:
        path = choose_path(comm.path, transport.cuda_findings(), lambda: prove(device, library=transport.library))
        _log.info("messages leave the GPU %s: %s", WORDS[path.name], path.reason)
        return asdict(path)

    transport.configure(timeout_s=max(comm.timeout_s, 2 * PROOF_WITHIN_S), wait=comm.wait)
    try:
        return MessagePath(**on_first_rank(transport, choose))
    finally:
        transport.configure(timeout_s=comm.timeout_s, wait=comm.wait)


WORDS = {"cuda-aware": "out of its own memory (cuda-aware)", "staged": "by way of host memory (staged)"}


def prove_here(transport: Transport, device: Device, comm: CommSection) -> None:
    """Exchange a test message out of ``device``'s memory between all neighbours, for the path ``cuda-aware``.
    Collective. Raises ``NotCudaAwareError`` on all ranks where it arrives wrong on one, or not within a minute.
    """
    if transport.size == 1:
        return
    if transport.rank == 0:
        _log.info(
            "exchanging a test message out of GPU memory: if the job crashes here, the MPI library is not CUDA-aware: "
            'set comm.path = "staged"'
        )
    transport.configure(timeout_s=min(comm.timeout_s, PROOF_WITHIN_S), wait=comm.wait)
    try:
        agree(transport, lambda: exchange_pattern(transport, device))
    finally:
        transport.configure(timeout_s=comm.timeout_s, wait=comm.wait)
