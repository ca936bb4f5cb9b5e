"""The device that a rank computes on, and the way its messages take."""

from __future__ import annotations

import logging

from mpipipe import environment
from mpipipe.collectives import agree, all_gather_objects
from mpipipe.config import Config
from mpipipe.device import Device, device_kind, open_device, shared_devices
from mpipipe.errors import ConfigError, DeviceBindingError
from mpipipe.trainer.path import decide_path, prove_here
from mpipipe.transport import Transport

_log = logging.getLogger(__name__)

HOST_PATH = "host"
"""The path of messages whose tensors live in host memory."""


def open_rank_device(config: Config, transport: Transport) -> tuple[Device, str]:
    """The device for ``comm.device`` and the path of its messages: ``"host"``, ``"staged"`` or ``"cuda-aware"``.
    Collective: all ranks have the same kind and path.

    Raises, on every rank, ``ConfigError`` when ranks ask for different ones, ``MissingDependencyError`` and
    ``DeviceBindingError`` for a GPU that was asked for and is not there, ``DeviceBindingError`` when only some ranks
    have one, ``NotCudaAwareError`` when messages out of GPU memory were asked for and arrive wrong.
    """
    comm = config.comm
    asked = [tuple(one) for one in all_gather_objects(transport, [comm.device, comm.path])]
    for rank, other in enumerate(asked):
        if other != asked[0]:
            error = ConfigError(
                f'rank 0 was given comm.device = "{asked[0][0]}", comm.path = "{asked[0][1]}", rank {rank} '
                f'"{other[0]}", "{other[1]}": every rank takes the same'
            )
            error.seen_alike = True
            raise error
    if comm.device == "cpu":
        return open_device("cpu"), HOST_PATH
    kind = agree(transport, lambda: device_kind(comm.device))
    kinds = all_gather_objects(transport, kind)
    if len(set(kinds)) > 1:
        without = [rank for rank, found in enumerate(kinds) if found != "cuda"]
        binding = DeviceBindingError(
            f'comm.device = "{comm.device}": {len(kinds) - len(without)} of {len(kinds)} ranks have a GPU, and rank '
            f"{without[0]} has none. Give every rank one, or compute on the CPU: comm.device = \"cpu\""
        )
        binding.seen_alike = True
        raise binding
    if kind == "cpu":
        if comm.path == "cuda-aware":
            binding = DeviceBindingError(
                'comm.path = "cuda-aware": no rank has a GPU that it can use (comm.device = "cuda" tells what is '
                'missing), and messages leave host memory. Set comm.path = "auto"'
            )
            binding.seen_alike = True
            raise binding
        return open_device("cpu"), HOST_PATH
    path = decide_path(transport, comm)

    def open_here() -> Device:
        staged = path.name == "staged"
        return open_device("cuda", local_rank=transport.local_rank, local_size=transport.local_size, staged=staged)

    device = agree(transport, open_here)
    places = all_gather_objects(transport, [environment.node_name(), device.identity])
    shared = shared_devices([(node, identity) for node, identity in places])
    if shared and transport.rank == 0:
        _log.warning("%s", shared)
    if path.name == "cuda-aware":
        prove_here(transport, device, comm)
    return device, path.name
