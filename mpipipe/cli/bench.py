"""``mpipipe bench``: what messages between neighbour ranks cost, and what the engine costs an action. Both verbs run on
every rank of an MPI launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mpipipe.cli.bench_engine import engine_config, measure_engine, show_engine
from mpipipe.cli.bench_p2p import SIZES, measure_p2p, parse_sizes, show_p2p
from mpipipe.cli.options import Json, new_group
from mpipipe.cli.output import print_json
from mpipipe.cli.ranks import on_ranks
from mpipipe.errors import ConfigError

if TYPE_CHECKING:
    from mpipipe.config import Config
    from mpipipe.transport import Transport

app = new_group("Measure this machine: messages between ranks, the engine's own time.")

Wait = Annotated[str, typer.Option("--wait", metavar="POLICY", help="How ranks wait: as comm.wait of a run file.")]


@app.command()
def p2p(
    sizes: Annotated[
        str, typer.Option("--sizes", metavar="N,N,...", help="Bytes of the messages; KiB, MiB and GiB are understood.")
    ] = SIZES,
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="N", help="Times of each; a tenth above 1 MiB, at least 3.", min=1)
    ] = 100,
    wait: Wait = "auto",
    as_json: Json = False,
) -> None:
    """Latency and bandwidth between neighbour ranks.

    Start it on every rank: mpirun -n 4 mpipipe bench p2p
    """

    def prepare(num_ranks: int) -> Config:
        from mpipipe.config import Config

        parse_sizes(sizes)
        if num_ranks < 2:
            raise ConfigError(
                "bench p2p measures messages between ranks, and this launch has one: start it with 'mpirun -n 2 "
                "mpipipe bench p2p'"
            )
        return Config.from_tables({"comm": {"wait": wait}}).resolve(num_ranks)

    def work(config: Config, transport: Transport) -> int:
        found = measure_p2p(config, transport, parse_sizes(sizes), repeats)
        if transport.rank == 0:
            print_json(found) if as_json else show_p2p(found)
        return 0

    raise typer.Exit(on_ranks(prepare, work, as_json=as_json))


@app.command()
def engine(
    schedule: Annotated[str, typer.Option("--schedule", metavar="NAME", help="As pipeline.schedule.")] = "1f1b",
    chunks: Annotated[
        int | None, typer.Option("--chunks", metavar="V", help="Default: the schedule's own.", show_default=False)
    ] = None,
    microbatches: Annotated[int, typer.Option("-m", metavar="M", help="Microbatches a step.", min=1)] = 64,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Steps that count.", min=1)] = 30,
    trace: Annotated[bool, typer.Option("--trace/--no-trace", help="With trace files, or without.")] = True,
    wait: Wait = "auto",
    as_json: Json = False,
) -> None:
    """Time per action of the engine, on layers that compute next to nothing.

    Start it on every rank: mpirun -n 2 mpipipe bench engine
    """

    def prepare(num_ranks: int) -> Config:
        return engine_config(
            num_ranks, schedule=schedule, chunks=chunks, microbatches=microbatches, steps=steps, trace=trace, wait=wait
        )

    def work(config: Config, transport: Transport) -> int:
        found = measure_engine(config, transport)
        if transport.rank == 0:
            print_json(found) if as_json else show_engine(found)
        return 0

    raise typer.Exit(on_ranks(prepare, work, as_json=as_json))
