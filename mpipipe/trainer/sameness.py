"""What every rank must bring alike, and what nothing else would show: the contents of a batch, and the weights of
layers that come as modules.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

from mpipipe.collectives import all_gather_objects
from mpipipe.errors import ConfigError, DataError
from mpipipe.schedule import Kind, ScheduleTable
from mpipipe.stage import Stage
from mpipipe.transport import Transport

_log = logging.getLogger(__name__)

WHOLE_BYTES = 1 << 20
"""A tensor above this is looked at in part: every second index of its longest dimension, until it is below."""

NOT_LOOKED_AT = -1
_MASK = (1 << 52) - 1  # exact in a float64, beside the other figures of a step


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """52 bits of the contents of the dense tensors; ``NOT_LOOKED_AT`` where one is not in host memory."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        if not tensor.is_cpu:
            return NOT_LOOKED_AT
        if tensor.layout is torch.strided and tensor.numel():
            digest.update(_bytes_of(tensor))
    return digest.intdigest() & _MASK


def joined(before: int, following: int) -> int:
    """One checksum of a sequence of them, begun with 0."""
    if NOT_LOOKED_AT in (before, following):
        return NOT_LOOKED_AT
    return xxhash.xxh3_64_intdigest(struct.pack("<qq", before, following)) & _MASK


def _bytes_of(tensor: torch.Tensor) -> Any:
    """What of the tensor is looked at, as an array without gaps. Takes a few microseconds: it is done in every step."""
    part = tensor.detach()
    while part.nbytes > WHOLE_BYTES:
        longest = max(range(part.dim()), key=part.shape.__getitem__)
        part = part[(slice(None),) * longest + (slice(None, None, 2),)]
    try:
        return np.ascontiguousarray(part.cpu().numpy())
    except (TypeError, RuntimeError):  # bfloat16, conjugated views
        return part.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()


def refuse_other_batches(checksums: Sequence[float], what: str = "batch") -> None:
    """Raise ``DataError``, on every rank alike, unless all ranks that looked at their batch have the same checksum."""
    looked = [(rank, int(value)) for rank, value in enumerate(checksums) if value != NOT_LOOKED_AT]
    for (before, expected), (rank, found) in pairwise(looked):
        if found != expected:
            raise DataError(
                f"rank {rank} brought another {what} than rank {before}: every rank must pass the same batch, in every "
                "bit. Seed a shuffling loader alike on all ranks, as DataLoader(..., "
                "generator=torch.Generator().manual_seed(SEED)), and give no rank a share of its own "
                "(DistributedSampler)"
            )


def instance_checksums(layers: Sequence[Any]) -> list[int | None]:
    """Of the parameters of every layer that comes as a module; None for a function, and for what is not in host
    memory.
    """
    found: list[int | None] = []
    for layer in layers:
        parameters = list(layer.parameters()) if isinstance(layer, nn.Module) else []
        held = [p for p in parameters if p.device.type == "cpu" and not nn.parameter.is_lazy(p)]
        found.append(checksum(held) if held and len(held) == len(parameters) else None)
    return found


def refuse_other_weights(transport: Transport, names: Sequence[str], mine: Sequence[int | None]) -> None:
    """Collective. Raise ``ConfigError``, on every rank alike, where two ranks made a layer with other weights."""
    gathered = all_gather_objects(transport, list(mine))
    for name, values in zip(names, zip(*gathered, strict=False), strict=False):
        looked = [(rank, value) for rank, value in enumerate(values) if value is not None]
        other = next((rank for rank, value in looked if value != looked[0][1]), None)
        if other is not None:
            raise ConfigError(
                f"layer {name} has other weights on rank {other} than on rank {looked[0][0]}, so they would depend on "
                "the cut. Modules come as they are: call torch.manual_seed(SEED) on every rank before they are made, "
                "or pass functions that make them, which are seeded from run.seed"
            )


def refuse_other_tables(transport: Transport, table: ScheduleTable) -> None:
    """Collective. Raises ConfigError on every rank if they do not have the same table of ``pipeline.schedule``: as when
    its file is not the same on all nodes. Warns of a table that does not give the bits of one rank.
    """
    digests = all_gather_objects(transport, table.digest())
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        error = ConfigError(
            f"rank {other} has another table than rank 0: all ranks need the same file and the same mpipipe",
            key="pipeline.schedule",
            value=table.name,
        )
        error.seen_alike = True
        raise error
    if not table.ordered and transport.rank == 0:
        _log.warning(
            "schedule %s makes weight gradients not in microbatch order: the run repeats its own bits, but not those "
            "of another schedule or number of ranks",
            table.name,
        )


def warn_of_forward_order(table: ScheduleTable, stages: Mapping[int, Stage]) -> None:
    """Warn of layers with buffers in a stage of this rank whose forwards are not in the order of the microbatches."""
    for index, stage in stages.items():
        order = table.microbatches[(table.kinds == Kind.F) & (table.stages == index)]
        layer = next((layer for layer in stage.layers if next(layer.module.buffers(), None) is not None), None)
        if layer is not None and bool(np.any(order[1:] < order[:-1])):
            _log.warning(
                "schedule %s makes the forwards of stage %d not in microbatch order: if layer %s changes buffers in "
                "them, as running statistics, they are others than with another schedule or number of ranks",
                table.name,
                index,
                layer.name,
            )
