"""Which GPU a rank takes."""

from __future__ import annotations

from collections.abc import Sequence

from mpipipe.errors import DeviceBindingError
from mpipipe.units import counted


def choose_device(num_visible: int, local_rank: int, local_size: int) -> int:
    """The number, among the GPUs that this rank sees, of the one to take.

    ``local_rank`` of ``local_size`` ranks on this node, as the ranks themselves found it (a split by shared memory): a
    launcher's variable may be that of its daemon, and the same on every rank. A launcher that gives each rank a GPU of
    its own shows it that one alone; one that gives the node's to all shows each rank all of them. With fewer GPUs than
    ranks they are dealt out in turn, and ``shared_devices`` tells of it.

    Raises ``DeviceBindingError`` where there is none.
    """
    if not 0 <= local_rank < local_size:
        raise ValueError(f"local rank {local_rank} of {local_size}")
    if num_visible < 1:
        raise DeviceBindingError(
            f'comm.device = "cuda": rank {local_rank} of {counted(local_size, "rank")} on this node sees no GPU; ask '
            'the launcher for GPUs on every node (as "--gpus-per-node") or use comm.device = "cpu"'
        )
    return local_rank % num_visible


def shared_devices(places: Sequence[tuple[str, str]]) -> str:
    """A warning about ranks that share a GPU; "" where each has its own.

    ``places``: of every rank its node's name and its device's ``identity`` (UUID), which is empty for one that computes
    on the CPU. Numbers tell nothing here: GPU 0 of two ranks may be two, and GPU 0 and 1 of two ranks the same.
    """
    ranks: dict[str, list[int]] = {}
    for rank, (_, identity) in enumerate(places):
        if identity:
            ranks.setdefault(identity, []).append(rank)
    found = [
        f"ranks {_listed(sharing)} share one GPU of node {places[sharing[0]][0]} ({identity})"
        for identity, sharing in ranks.items()
        if len(sharing) > 1
    ]
    if not found:
        return ""
    rest = f", and {counted(len(found) - 1, 'other GPU')} likewise" if len(found) > 1 else ""
    return f"{found[0]}{rest}: they wait for each other; start as many ranks on a node as it has GPUs"


def _listed(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
