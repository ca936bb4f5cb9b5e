"""SIGUSR2: says where the rank is, calls the user's handler, and leaves everything as it was."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from mpipipe.lifecycle import PlaceSignal
from mpipipe.transport import Place, solo
from mpipipe.transport.loopback import LoopbackTransport

LINE = "mpipipe: rank 0 {} (row 0, step 1), not waiting; open: nothing\n"


def at(place: str) -> LoopbackTransport:
    transport = solo()
    transport.describe_by(lambda look: Place(f"{place} (row 0, step 1)"))
    return transport


def send() -> None:
    signal.raise_signal(signal.SIGUSR2)


@pytest.fixture
def mine() -> Iterator[list[int]]:
    """The signals that a handler of the user's own has seen."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    yield seen
    signal.signal(signal.SIGUSR2, before)


def test_a_signal_tells_the_place_and_goes_on_to_the_handler_before(
    mine: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    handler, transport = signal.getsignal(signal.SIGUSR2), at("at 0F0")
    place = PlaceSignal(transport)
    send()
    assert (capfd.readouterr().err, mine) == (LINE.format("at 0F0"), [signal.SIGUSR2])
    place.close()
    place.close()
    assert signal.getsignal(signal.SIGUSR2) is handler
    send()
    assert (capfd.readouterr().err, len(mine)) == ("", 2)


def test_the_default_action_comes_back() -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    try:
        transport = solo()
        place = PlaceSignal(transport)
        send()  # by itself it would end the process
        place.close()
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_sleep_and_a_full_standard_error_are_no_trouble(mine: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(descriptor: int, data: bytes) -> int:
        raise BrokenPipeError

    transport = solo()
    place = PlaceSignal(transport)
    monkeypatch.setattr("mpipipe.lifecycle.os.write", closed)
    timer = threading.Timer(0.02, lambda: os.kill(os.getpid(), signal.SIGUSR2))
    timer.start()
    start = time.monotonic()
    time.sleep(0.1)
    timer.join()
    assert time.monotonic() - start >= 0.1
    assert len(mine) == 1
    place.close()


@pytest.mark.parametrize("first", [0, 1])
def test_two_may_be_closed_in_any_order(first: int, mine: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    handler = signal.getsignal(signal.SIGUSR2)
    transports = [at("at 0F0"), at("at 0F1")]
    places = [PlaceSignal(transport) for transport in transports]
    send()
    assert capfd.readouterr().err == LINE.format("at 0F1") + LINE.format("at 0F0")
    places[first].close()
    send()
    assert capfd.readouterr().err == LINE.format(("at 0F1", "at 0F0")[first])
    places[1 - first].close()
    assert signal.getsignal(signal.SIGUSR2) is handler
    assert len(mine) == 2


def test_one_that_is_never_closed_goes_with_its_transport(mine: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    handler, transport = signal.getsignal(signal.SIGUSR2), at("at 0F0")
    PlaceSignal(transport)
    del transport
    gc.collect()
    send()
    assert (capfd.readouterr().err, len(mine)) == ("", 1)
    other = at("at 0F1")
    place = PlaceSignal(other)
    assert place.before is handler
    place.close()


def test_a_handler_that_came_later_stays(mine: list[int]) -> None:
    transport = solo()
    place = PlaceSignal(transport)
    later = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    place.close()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    assert later is place


def test_another_thread_takes_no_signals(mine: list[int]) -> None:
    handler, transport = signal.getsignal(signal.SIGUSR2), solo()
    thread = threading.Thread(target=lambda: PlaceSignal(transport).close())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGUSR2) is handler
