"""What ``mpipipe bench p2p`` measures: latency and bandwidth of messages between neighbour ranks."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from mpipipe import environment
from mpipipe.cli.output import print_table
from mpipipe.errors import ConfigError
from mpipipe.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from mpipipe.config import Config
    from mpipipe.device import Device, Memory
    from mpipipe.transport import Request, Transport

SIZES = "8,64,512,4KiB,32KiB,256KiB,2MiB,16MiB,64MiB"
MAX_SIZE_BYTES = 1 << 33
WINDOW_MESSAGES = 16
WINDOW_BYTES = 1 << 25
"""Bandwidth is that of so many messages at once, fewer where they are larger together, at least one."""

OFTEN_UP_TO_BYTES = 1 << 20
"""Longer messages are sent a tenth as often."""

_DATA_TAG, _WORD_TAG = 0, 1
_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def parse_sizes(text: str) -> list[int]:
    """Bytes of ``8,64,4KiB,2MiB``, ascending, each once. Raises ConfigError (key ``--sizes``)."""
    found = set()
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,10})\s*([kmg]?i?b?)", part.strip().lower(), re.ASCII)
        factor = None if match is None else _UNITS.get(match[2])
        nbytes = 0 if match is None or factor is None else int(match[1]) * factor
        if not 1 <= nbytes <= MAX_SIZE_BYTES:
            allowed = f"whole numbers from 1 to {format_bytes(MAX_SIZE_BYTES)}, alone or with KiB, MiB or GiB"
            raise ConfigError(f"{part.strip()!r} is no size of a message", key="--sizes", value=part, allowed=allowed)
        found.add(nbytes)
    return sorted(found)


def _refuse_other_options(transport: Transport, options: list[Any]) -> None:
    from mpipipe.collectives import all_gather_objects

    for rank, others in enumerate(all_gather_objects(transport, options)):
        if others != options:
            raise ConfigError(
                f"rank {rank} was started with other options than rank {transport.rank}: {others}, {options}"
            )


def about(config: Config, transport: Transport) -> dict[str, Any]:
    """Where it was measured. Collective."""
    from mpipipe.collectives import all_gather_objects
    from mpipipe.device import device_kind

    mine = [environment.node_name(), environment.has_core_of_its_own(transport.local_size)]
    ranks = all_gather_objects(transport, mine)
    nodes = [node for node, _ in ranks]
    return {
        "library": " ".join(transport.library.split()),
        "wait": config.comm.wait,
        "cores_shared": not all(alone for _, alone in ranks),
        "num_ranks": transport.size,
        "ranks_per_node": {node: nodes.count(node) for node in nodes},
        "device": device_kind(config.comm.device),
    }


def show_about(found: dict[str, Any]) -> None:
    cores = "ranks share cores" if found["cores_shared"] else "every rank has a core of its own"
    nodes = ", ".join(f"{count} on {node}" for node, count in found["ranks_per_node"].items())
    print(f"library: {found['library']}")
    path = f" ({found['path']})" if found.get("path", "host") != "host" else ""
    print(f"ranks: {nodes}; wait: {found['wait']} ({cores}); device: {found['device']}{path}")


class _Pair:
    """This rank's half of the exchanges with its neighbour. The lower rank leads: it says when to begin, and takes the
    time."""

    def __init__(self, transport: Transport, peer: int, allocate: Callable[[int], Memory], nbytes: int) -> None:
        import numpy as np

        self._transport, self._peer, self._leads = transport, peer, transport.rank < peer
        self.messages = max(1, min(WINDOW_MESSAGES, WINDOW_BYTES // nbytes))
        self._out, self._word = allocate(nbytes), allocate(1)
        self._into = [allocate(nbytes) for _ in range(self.messages)]
        for memory in (self._out, self._word, *self._into):
            if isinstance(memory, np.ndarray):
                memory[:] = 0  # touched: the first message pays for no page

    def _wait(self, *requests: Request) -> None:
        for request in requests:
            self._transport.wait(request, f"a message of bench p2p with rank {self._peer}")

    def _say(self) -> None:
        self._wait(self._transport.isend(self._word, self._peer, _WORD_TAG))

    def _hear(self) -> None:
        self._wait(self._transport.irecv(self._word, self._peer, _WORD_TAG))

    def _receive(self) -> Request:
        return self._transport.irecv(self._into[0], self._peer, _DATA_TAG)

    def _send(self) -> Request:
        return self._transport.isend(self._out, self._peer, _DATA_TAG)

    def round_trip(self) -> float:
        """Seconds of a message to the neighbour and one back."""
        begun = time.perf_counter()
        receive = self._receive()
        if not self._leads:
            self._wait(receive)
        send = self._send()
        if self._leads:
            self._wait(receive)
        self._wait(send)
        return time.perf_counter() - begun

    def stream(self, to_next: bool, to_previous: bool) -> float:
        """Seconds until ``messages`` messages have arrived, of each of the directions at once."""
        transport, peer = self._transport, self._peer
        sends, receives = (to_next, to_previous) if self._leads else (to_previous, to_next)
        begun = time.perf_counter()
        wanted = [transport.irecv(memory, peer, _DATA_TAG) for memory in self._into] if receives else []
        (self._say if self._leads else self._hear)()
        under_way = [transport.isend(self._out, peer, _DATA_TAG) for _ in self._into] if sends else []
        self._wait(*wanted)
        if to_next:
            (self._hear if self._leads else self._say)()
        self._wait(*under_way)
        return time.perf_counter() - begun


def measure_p2p(config: Config, transport: Transport, sizes: list[int], repeats: int) -> dict[str, Any]:
    """Medians for every pair of neighbours, one after another, as a dict that JSON can hold: times in seconds, sizes in
    bytes. Collective. Raises ConfigError on every rank when they were started with other options.
    """
    from mpipipe.collectives import all_gather_objects
    from mpipipe.trainer.devices import open_rank_device

    _refuse_other_options(transport, [sizes, repeats])
    transport.configure(timeout_s=config.comm.timeout_s, wait=config.comm.wait)
    device, path = open_rank_device(config, transport)
    pairs = []
    for lower in range(transport.size - 1):
        for nbytes in sizes:
            mine = None
            if transport.rank in (lower, lower + 1):
                peer = 2 * lower + 1 - transport.rank
                pair = _Pair(transport, peer, partial(_message_memory, device), nbytes)
                mine = _medians(pair, nbytes, repeats)
            pairs.append({"rank": lower, "next": lower + 1, **all_gather_objects(transport, mine)[lower]})
    return {**about(config, transport), "path": path, "pairs": pairs}


def _message_memory(device: Device, nbytes: int) -> Memory:
    """Memory that a transport sends from and receives into: on a GPU without a CUDA-aware library that of the host."""
    buffer = device.allocate(nbytes)
    device.receiving(buffer)
    return buffer.message


def _medians(pair: _Pair, nbytes: int, repeats: int) -> dict[str, Any]:
    count = repeats if nbytes <= OFTEN_UP_TO_BYTES else min(repeats, max(3, repeats // 10))

    def median_s(action: Callable[[], float]) -> float:
        for _ in range(1 + count // 10):
            action()
        return statistics.median(action() for _ in range(count))

    total = nbytes * pair.messages
    return {
        "message_bytes": nbytes,
        "repeats": count,
        "messages_at_once": pair.messages,
        "one_way_s": median_s(pair.round_trip) / 2,
        "to_next_bytes_per_s": total / median_s(partial(pair.stream, True, False)),
        "to_previous_bytes_per_s": total / median_s(partial(pair.stream, False, True)),
        "both_ways_bytes_per_s": 2 * total / median_s(partial(pair.stream, True, True)),
    }


def show_p2p(found: dict[str, Any]) -> None:
    show_about(found)
    print(
        f"one way: half a round trip; GB/s: 10^9 bytes a second, up to {WINDOW_MESSAGES} messages at once; medians\n"
    )
    rates = ("to_next_bytes_per_s", "to_previous_bytes_per_s", "both_ways_bytes_per_s")
    rows = [
        [
            f"{row['rank']}-{row['next']}",
            format_bytes(row["message_bytes"]),
            format_seconds(row["one_way_s"]),
            *(f"{row[rate] / 1e9:.3f}" for rate in rates),
        ]
        for row in found["pairs"]
    ]
    print_table(["ranks", "message", "one way", "to next GB/s", "to previous GB/s", "both ways GB/s"], rows)
