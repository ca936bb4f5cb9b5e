"""Check of ``device_check.py``: how fast messages leave a GPU and reach it, and go from rank to rank.

    mpirun -n 2 python tools/device_check_copies.py ranks PAYLOAD     PAYLOAD: JSON, ``paths``, ``sizes``, ``folder``
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from device_check_answers import Answers, Settings, answer, launch, left_s

MIB = 1 << 20
MESSAGE_BYTES = (MIB, 16 * MIB, 64 * MIB)
TURN_BYTES = 256 * MIB
ROUNDS = 7
MESSAGES = 8


# --- copies ---


def check_right_bytes(device: Any, nbytes: int) -> str:
    """A message out and in again; empty, or what is wrong."""
    import torch

    pattern = (torch.arange(nbytes, dtype=torch.int64) * 131 % 251).to(torch.uint8)
    outs = device.outgoing_parts(pattern.to(device.torch_device))
    device.finish()
    if not torch.equal(torch.cat([torch.from_numpy(out.message) for out in outs]), pattern):
        return "the bytes in host memory are not those of the tensor"
    into = device.allocate(nbytes)
    for out, part in zip(outs, device.receiving_parts(into), strict=True):
        part.message[:] = out.message
        device.sent(out)
        device.landed(part)
    arrived = device.copy_to_host(device.tensor(into, (nbytes,), torch.uint8))
    device.release(into)
    return "" if torch.equal(arrived, pattern) else "the bytes of the tensor are not those in host memory"


def out_turn(device: Any, tensor: Any, count: int) -> Callable[[], None]:
    """``count`` messages on their way to host memory, one behind the other."""

    def turn() -> None:
        outs = [out for _ in range(count) for out in device.outgoing_parts(tensor)]
        device.finish()
        for out in outs:
            device.sent(out)
        device.take_copies()

    return turn


def in_turn(device: Any, nbytes: int, count: int) -> Callable[[], None]:
    """``count`` messages on their way out of host memory. Nothing is received into it: MPI is not measured here."""
    import torch

    buffers = [device.allocate(nbytes) for _ in range(count)]

    def turn() -> None:
        for buffer in buffers:
            for part in device.receiving_parts(buffer):
                device.landed(part)
            device.tensor(buffer, (nbytes,), torch.uint8)
            device.release(buffer)
        device.finish()
        device.take_copies()

    return turn


def bare_turns(nbytes: int, count: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """(Out, in) by torch alone, pinned memory, on a stream of its own."""
    import torch

    stream = torch.cuda.Stream()
    tensor = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    pinned = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
    torch.cuda.synchronize()

    def out() -> None:
        with torch.cuda.stream(stream):
            for memory in pinned:
                memory.copy_(tensor, non_blocking=True)
        stream.synchronize()

    def into() -> None:
        with torch.cuda.stream(stream):
            for memory in pinned:
                tensor.copy_(memory, non_blocking=True)
        stream.synchronize()

    return out, into


def rates_of(turns: dict[str, Callable[[], None]], nbytes: int) -> dict[str, float]:
    """Bytes a second of turns that move ``nbytes``, medians of ROUNDS in alternation after one that warms up."""
    taken: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(ROUNDS + 1):
        for name, turn in turns.items():
            begun = time.perf_counter()
            turn()
            if number:
                taken[name].append(time.perf_counter() - begun)
    return {name: nbytes / statistics.median(values) for name, values in taken.items()}


def check_staged(settings: Settings, answers: Answers) -> None:
    if settings["device"] == "cuda":
        _copies(answers)
    else:
        answers.row("copies", "absent", "needs a GPU")
    if settings["launcher"] is None:
        answers.row("rank to rank", "absent", "needs MPI ranks")
    elif left_s(settings) > 8:
        rates_over_mpi(settings, answers, ["host memory", "staged"][: 1 + (settings["device"] == "cuda")])


def _copies(answers: Answers) -> None:
    import torch

    from mpipipe.device import open_device

    device = open_device("cuda", staged=True)
    for nbytes in (1, 1000, MIB, 16 * MIB + 12):
        wrong = check_right_bytes(device, nbytes)
        if wrong:
            answers.row("bytes", "wrong", f"{nbytes} bytes: {wrong}")
            return
    answers.row("bytes", "ok", "what goes out and comes in again is the same")
    for nbytes in MESSAGE_BYTES:
        count = min(16, max(2, TURN_BYTES // nbytes))
        tensor = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        bare_out, bare_in = bare_turns(nbytes, count)
        ours_out, ours_in = out_turn(device, tensor, count), in_turn(device, nbytes, count)
        for way, ours, bare in (("GPU to host", ours_out, bare_out), ("host to GPU", ours_in, bare_in)):
            rates = rates_of({"ours": ours, "bare": bare}, count * nbytes)
            ratio = rates["ours"] / rates["bare"]
            text = (
                f"{rates['ours'] / 1e9:.2f} GB/s, bare copies from and to pinned memory "
                f"{rates['bare'] / 1e9:.2f} GB/s: {ratio:.3f} of them ({count} messages in a row)"
            )
            answers.row(f"{way}, {nbytes // MIB} MiB", "ok", text, ratio=ratio, **rates)


# --- messages over MPI ---


def _reach(mark: Any) -> None:
    while mark is not None and not mark.reached():
        pass


def send_one(transport: Any, device: Any, tensor: Any) -> None:
    """As the engine does it: each part as soon as it is there."""
    sent = []
    for out in device.outgoing_parts(tensor):
        _reach(out.ready)
        sent.append((out, transport.isend(out.message, 1, 0)))
    for out, request in sent:
        transport.wait(request, "rank 1 to take a part")
        device.sent(out)


def receive_one(transport: Any, device: Any, buffer: Any) -> None:
    """As the engine does it: each part is copied to the device while the next one comes."""
    import torch

    _reach(buffer.free)
    parts = device.receiving_parts(buffer)
    requests = [transport.irecv(part.message, 0, 0) for part in parts]
    for part, request in zip(parts, requests, strict=True):
        transport.wait(request, "a part of rank 0")
        if part.landing:
            device.landed(part)
    device.tensor(buffer, (buffer.nbytes,), torch.uint8)
    device.release(buffer)


def message_rate(transport: Any, device: Any, nbytes: int) -> float:
    """Bytes a second from rank 0 to rank 1, one message after another; the median of ROUNDS. Collective."""
    import torch

    from mpipipe.collectives import barrier

    taken = []
    tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device.torch_device)
    buffer = device.allocate(nbytes)
    for _ in range(ROUNDS + 1):
        device.finish()
        barrier(transport)
        begun = time.perf_counter()
        for _ in range(MESSAGES):
            if transport.rank == 0:
                send_one(transport, device, tensor)
            else:
                receive_one(transport, device, buffer)
        device.finish()
        device.take_copies()
        barrier(transport)
        taken.append(time.perf_counter() - begun)
    return MESSAGES * nbytes / statistics.median(taken[1:])


def rank_main(payload: dict[str, Any]) -> None:
    """On both ranks of a launch."""
    from mpipipe.device import open_device
    from mpipipe.transport import open_world

    transport = open_world()
    for path in payload["paths"]:
        local = {"local_rank": transport.local_rank, "local_size": transport.local_size}
        name = "cpu" if path == "host memory" else "cuda"
        device = open_device(name, **local, staged=path != "cuda-aware")
        found = [message_rate(transport, device, nbytes) for nbytes in payload["sizes"]]
        if transport.rank == 0:
            with (Path(payload["folder"]) / "rates.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps([path, found]) + "\n")
    transport.close()


def rates_over_mpi(
    settings: Settings, answers: Answers, paths: Sequence[str], more: dict[str, str] | None = None
) -> None:
    """A row for each path, of messages from rank to rank, one at a time."""
    sizes = MESSAGE_BYTES if settings["device"] == "cuda" else MESSAGE_BYTES[:1]
    with tempfile.TemporaryDirectory(prefix="rates-") as folder:
        payload = json.dumps({"paths": list(paths), "sizes": sizes, "folder": folder})
        said = launch(settings, 2, [__file__, "ranks", payload], min(40, left_s(settings) - 6), more)
        path = Path(folder) / "rates.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        name, found = json.loads(line)
        each = ", ".join(f"{nbytes // MIB} MiB {rate / 1e9:.2f}" for nbytes, rate in zip(sizes, found, strict=True))
        answers.row(f"rank to rank, {name}", "ok", f"GB/s from rank 0 to rank 1: {each}", rates=found, sizes=sizes)
    if said.trouble():
        answers.row("rank to rank", "wrong", f"after {len(lines)} of {len(paths)} paths: {said.trouble()}")


if __name__ == "__main__":
    if sys.argv[1] == "ranks":
        rank_main(json.loads(sys.argv[2]))
    else:
        answer({"staged": check_staged})
