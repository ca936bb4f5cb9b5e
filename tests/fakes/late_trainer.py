"""Trainers that compute on late devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from fakes.late import LateDriver
from fakes.late_stage import late_stage

from mpipipe.config import Config
from mpipipe.device import StreamDevice
from mpipipe.trainer import trainer as room
from mpipipe.transport import Transport


@contextmanager
def late_devices(staged: bool) -> Iterator[list[LateDriver]]:
    """Every trainer made inside has a late device, and stages whose methods are kernels of it. Gives the drivers, and
    checks at the end that nothing was read or written too early.
    """
    drivers: list[LateDriver] = []
    build = room.build_rank_model

    def opened(config: Config, transport: Transport) -> tuple[StreamDevice, str]:
        driver = LateDriver(transport.rank)
        drivers.append(driver)
        return StreamDevice(driver, staged), "staged" if staged else "cuda-aware"

    def built(*given: Any) -> Any:
        model = build(*given)
        for stage in model.stages.values():
            late_stage(stage, given[-1]._driver)
        return model

    with mock.patch.object(room, "open_rank_device", opened), mock.patch.object(room, "build_rank_model", built):
        yield drivers
    assert drivers
    for driver in drivers:
        driver.check()
