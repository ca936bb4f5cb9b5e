"""``python -m mpipipe.transport.probe DEVICE`` on two ranks: does memory of that device arrive right?

DEVICE: what ``comm.device`` takes, or ``MODULE:FUNCTION``, a function that gives a device. Rank 0 answers with a line,
ANSWER and JSON: ``{"right": true}`` for both ranks. A rank that sees something else says ``{"error": "..."}`` and ends
both. A crash is an answer too: so this is a program of its own, which ``proof.prove`` starts.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import TYPE_CHECKING

import numpy as np

from mpipipe.errors import MpipipeError
from mpipipe.transport import open_world
from mpipipe.transport.proof import ANSWER, PROOF_WITHIN_S, wrong_arrivals
from mpipipe.transport.protocol import MEETING_TAG

if TYPE_CHECKING:
    from mpipipe.device import Device
    from mpipipe.transport import Transport

_EXIT_NOT_PROVED = 4


def main(device: str) -> int:
    """The exit code: 0 where all arrived right."""
    try:
        transport = open_world()
    except MpipipeError as error:
        _answer(error=str(error))
        return error.exit_code
    transport.configure(timeout_s=PROOF_WITHIN_S / 2, wait="auto")
    try:
        trouble = "; ".join(wrong_arrivals(transport, _open(device, transport))[:3])
        if trouble:
            trouble = f"a message arrived wrong ({trouble})"
        else:
            _meet(transport)
    except Exception as error:
        trouble = f"{type(error).__name__}: {error}"
    if trouble:
        _answer(error=trouble)
        transport.abort(_EXIT_NOT_PROVED)
    if transport.rank == 0:
        _answer(right=True)
    transport.close()
    return 0


def _answer(**fields: object) -> None:
    sys.stdout.write(f"{ANSWER}{json.dumps(fields)}\n")
    sys.stdout.flush()


def _open(device: str, transport: Transport) -> Device:
    module, _, function = device.partition(":")
    if function:
        opened: Device = getattr(importlib.import_module(module), function)()
        return opened
    from mpipipe.device import open_device

    return open_device(device, local_rank=transport.local_rank, local_size=transport.local_size, staged=False)


def _meet(transport: Transport) -> None:
    """Both ranks have got here: by a word in host memory, each to the other."""
    peer = 1 - transport.rank
    word = np.zeros(2, dtype=np.uint8)
    receive = transport.irecv(word[:1], peer, MEETING_TAG)
    send = transport.isend(word[1:], peer, MEETING_TAG)
    transport.wait(receive, f"rank {peer} to have compared its messages")
    transport.wait(send, f"rank {peer} to take a word")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
