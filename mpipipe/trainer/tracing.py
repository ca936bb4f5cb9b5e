"""Opens the trace of a launch: the next free segment, one file a rank."""

from __future__ import annotations

import secrets
import socket

from mpipipe.collectives import attempt, on_first_rank
from mpipipe.config import Config
from mpipipe.errors import SetupError
from mpipipe.formats.paths import RunPaths
from mpipipe.formats.trace import TraceWriter
from mpipipe.trainer.build import LayerList, RankModel
from mpipipe.trainer.devices import HOST_PATH
from mpipipe.transport import Transport


def open_trace(
    config: Config,
    paths: RunPaths,
    transport: Transport,
    model: RankModel,
    layers: LayerList,
    device: str = "cpu",
    path: str = HOST_PATH,
) -> TraceWriter:
    """This rank's file in a new segment of the run folder. Collective. ``device``: its name; ``path``: of messages.

    Raises ``SetupError`` on every rank when one of them can't write there.
    """
    segment, run_id = on_first_rank(transport, lambda: [paths.next_segment(), secrets.token_hex(8)])
    header: dict[str, object] = {
        "rank": transport.rank,
        "world_size": transport.size,
        "p": transport.size,
        "v": config.pipeline.chunks,
        "d": config.pipeline.replicas,
        "host": socket.gethostname(),
        "mpi_library": transport.library,
        "device": device,
        "message_path": path,
        "run_id": run_id,
        "segment": segment,
        "first_trained_stage": model.first_trained,
        "config": config.to_toml(),
    }

    def open_file() -> TraceWriter:
        writer = TraceWriter(paths.trace_file(segment, transport.rank), header)
        try:
            writer.set_model(_model_rows(config, model, layers))
        except BaseException:
            writer.discard()
            raise
        return writer

    writer, faults = attempt(transport, open_file)
    if faults:
        if writer is not None:
            writer.discard()
        troubles = [f"rank {fault.rank}: {fault.error}" for fault in faults[:3]]
        raise SetupError(
            f"the trace can't be written in {paths.trace_segment(segment)}: {'; '.join(troubles)}. "
            "Set run.dir to a folder that every rank can write to, or trace.enabled = false"
        )
    assert writer is not None
    return writer


def _model_rows(config: Config, model: RankModel, layers: LayerList) -> list[dict[str, object]]:
    """What the trace says of every stage. FLOPs only where the layers' costs are known in FLOPs."""
    rows: list[dict[str, object]] = []
    for stage in range(model.partition.num_stages):
        members = [layers.descriptions[index] for index in model.partition.layers_of(stage)]
        row: dict[str, object] = {
            "stage": stage,
            "num_layers": len(members),
            "layers": [member.name for member in members],
        }
        if layers.has_flops and config.model is not None:
            sequence = config.model.sequence
            row["parameters"] = sum(member.num_parameters for member in members)
            row["forward_flops_per_token"] = sum(member.flops_forward for member in members) / sequence
            row["backward_flops_per_token"] = sum(member.flops_backward for member in members) / sequence
        rows.append(row)
    return rows
