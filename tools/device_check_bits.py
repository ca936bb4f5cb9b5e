"""Checks of ``device_check.py``: the bit contract. A small GPT-2, trained by mpipipe's own trainer at one rank and at
several, whose losses, gradient norms, parameters and moments are to be equal in every bit.

    mpirun -n P python tools/device_check_bits.py ranks PAYLOAD       one launch of it

PAYLOAD: JSON, ``device``, ``path``, ``small``, ``schedules``, ``folder``. Every rank leaves a file there for every
schedule. Threads take turns (the loopback transport), and so never draw from torch's generator at once; their compute
is on one stream of the GPU, which they share, or on a stream each.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from device_check_answers import Answers, Settings, answer, error_text, launch, left_s

SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2), ("gpipe", 1))
STEPS = 3
KERNELS = ("as torch chooses", "attention of plain products", "attention of plain products, others if there are none")
"""Tried in turn until one rank repeats its own bits: else nothing can be compared."""

Outcome = dict[str, Any]
"""``steps``: [loss, norm] of each, as hexadecimal floats; ``state``: parameters and moments by name, on the CPU."""


def sizes(device: str, small: bool) -> dict[str, int]:
    """Of the model: enough layers for eight stages."""
    if device == "cpu":
        return {"layers": 8, "hidden": 16, "heads": 2, "vocab": 96, "sequence": 8}
    if small:
        return {"layers": 8, "hidden": 64, "heads": 4, "vocab": 512, "sequence": 32}
    return {"layers": 12, "hidden": 256, "heads": 8, "vocab": 2048, "sequence": 128}


def make_config(schedule: str, chunks: int, device: str, path: str, small: bool) -> Any:
    from mpipipe.config import Config

    return Config.from_tables(
        {
            "run": {"seed": 3, "steps": 20, "dir": "unused"},
            "model": sizes(device, small) | {"dropout": 0.1, "tie_embeddings": True},
            "batch": {"sequences": 15, "microbatch": 2},  # the last microbatch is smaller
            "pipeline": {"schedule": schedule, "chunks": chunks},
            "optimizer": {"lr": 1e-3, "clip_norm": 0.3},
            "trace": {"enabled": False},
            "comm": {"device": device, "path": path if device == "cuda" else "auto", "timeout_s": 60.0},
        }
    )


def deterministic(settings: Settings) -> None:
    """Kernels that always add in the same order, and no TF32. CUBLAS_WORKSPACE_CONFIG comes from the environment.
    ``kernels`` of the settings: which of KERNELS.
    """
    import torch

    kernels = settings.get("kernels", KERNELS[0])
    torch.use_deterministic_algorithms(True, warn_only=kernels == KERNELS[2])
    for enable in ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_cudnn_sdp"):
        getattr(torch.backends.cuda, enable)(kernels == KERNELS[0])
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False


def make_trainer(config: Any, transport: Any) -> Any:
    from mpipipe.model import gpt2_layers, token_loss
    from mpipipe.trainer import Trainer

    layers = gpt2_layers(config.model, config.run.seed)
    return Trainer(
        config,
        layers.factories,
        token_loss,
        tied=layers.tied,
        names=layers.names,
        descriptions=layers.descriptions,
        transport=transport,
    )


def make_batch(config: Any, step: int) -> Any:
    """Random tokens and the next ones, a function of the step, on the CPU."""
    import torch

    generator = torch.Generator().manual_seed(1000 + step)
    size = (config.batch.sequences, config.model.sequence + 1)
    tokens = torch.randint(0, config.model.vocab, size, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(config: Any, transport: Any) -> Outcome:
    """This rank's part of STEPS steps."""
    made = make_trainer(config, transport)
    steps, state = [], {}
    for step in range(STEPS):
        report = made.step_report(make_batch(config, step))
        steps.append([float(report.loss).hex(), float(report.grad_norm).hex()])
    for name, parameter in made.model.parameters.items():
        kinds = ("value", "exp_avg", "exp_avg_sq")
        for kind, tensor in zip(kinds, (parameter, *made.optimizer.moments(name)), strict=True):
            state[f"{kind} of {name}"] = tensor.detach().cpu().clone()
    made.close()
    return {"steps": steps, "state": state}


def differences(found: Sequence[Outcome], reference: Outcome) -> list[str]:
    """In words; empty where all ranks together have the reference's bits."""
    import torch

    told = []
    for rank, outcome in enumerate(found):
        for step, (mine, theirs) in enumerate(zip(outcome["steps"], reference["steps"], strict=True), 1):
            for what, one, other in zip(("loss", "norm"), mine, theirs, strict=True):
                if one != other:
                    told.append(f"{what} of step {step} on rank {rank}: {float.fromhex(one)!r}, at one rank "
                                f"{float.fromhex(other)!r}")  # fmt: skip
    seen: set[str] = set()
    for rank, outcome in enumerate(found):
        seen |= set(outcome["state"])
        for name, tensor in outcome["state"].items():
            other = reference["state"].get(name)
            if other is None or tensor.shape != other.shape:
                told.append(f"{name} on rank {rank} is not that of one rank")
            elif not torch.equal(tensor, other):
                far = float((tensor - other).abs().max())
                told.append(f"{name} on rank {rank} ({int((tensor != other).sum())} elements, {far:.2e} at most)")
    told += [f"no rank has {name}" for name in reference["state"] if name not in seen]
    return told


def tell(answers: Answers, case: str, schedules: dict[str, list[str]], reference: Outcome, seconds: float) -> None:
    """One row for several schedules: what of each differs."""
    bad = {name: told for name, told in schedules.items() if told}
    if bad:
        text = "; ".join(f"{name}: {len(told)} differ: {', '.join(told[:2])}" for name, told in bad.items())
        good = [name for name in schedules if name not in bad]
        answers.row(case, "wrong", f"{text}; equal: {', '.join(good) or 'none'}", differing=sorted(bad))
        return
    text = (
        f"{', '.join(schedules)}: {STEPS} steps, losses, norms and {len(reference['state'])} tensors equal bit for bit "
        f"({seconds:.1f} s)"
    )
    answers.row(case, "ok", text)


def label(schedule: str, chunks: int) -> str:
    return schedule if chunks == 1 else f"{schedule} v={chunks}"


# --- one rank ---


def one_rank(settings: Settings) -> Outcome:
    from mpipipe.transport import solo

    return train(make_config("1f1b", 1, settings["device"], "staged", settings["small"]), solo())


def make_reference(settings: Settings, answers: Answers) -> Outcome | None:
    """One rank twice, which is to repeat itself. Sets ``kernels``: those with which it does."""
    for kernels in KERNELS:
        settings["kernels"] = kernels
        deterministic(settings)
        begun = time.monotonic()
        try:
            first, second = one_rank(settings), one_rank(settings)
        except RuntimeError as error:
            if "determinis" not in str(error):
                raise
            answers.row("one rank", "missed", f"kernels {kernels}: {error_text(error)}")
            continue
        told = differences([second], first)
        losses = ", ".join(f"{float.fromhex(loss):.6f}" for loss, _ in first["steps"])
        if not told:
            text = f"repeats its own bits, kernels {kernels}; losses {losses} ({time.monotonic() - begun:.1f} s)"
            answers.row("one rank", "ok", text, model=sizes(settings["device"], settings["small"]))
            return first
        answers.row("one rank", "wrong", f"does not repeat itself, kernels {kernels}: {'; '.join(told[:3])}")
    return None


# --- threads ---


@contextlib.contextmanager
def _stream_of_its_own(wanted: bool) -> Iterator[None]:
    import torch

    if not wanted:
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


def on_threads(settings: Settings, p: int, schedule: tuple[str, int], path: str, own_streams: bool) -> list[Outcome]:
    from mpipipe.transport import run_ranks

    config = make_config(*schedule, settings["device"], path, settings["small"])

    def work(transport: Any) -> Outcome:
        with _stream_of_its_own(own_streams):
            return train(config, transport)

    return run_ranks(p, work)


def compare(make: Callable[[], list[Outcome]], reference: Outcome) -> list[str]:
    """What differs, or the error of the run."""
    try:
        return differences(make(), reference)
    except Exception as error:
        return [error_text(error)]


def check_bits(settings: Settings, answers: Answers) -> None:
    reference = make_reference(settings, answers)
    if reference is None:
        return
    on_gpu = settings["device"] == "cuda"
    cases = [(p, path, False) for path in (("staged", "cuda-aware") if on_gpu else ("host",)) for p in (2, 4)]
    cases += [(2, path, True) for path in ("staged", "cuda-aware") if on_gpu]
    for p, path, own_streams in cases:
        begun, found = time.monotonic(), {}
        for schedule in SCHEDULES[:1] if own_streams else SCHEDULES:
            if left_s(settings) < 3:
                break
            print(f"{p} threads, {path}, {label(*schedule)}", flush=True)
            make = lambda s=schedule, p=p, path=path, own=own_streams: on_threads(settings, p, s, path, own)  # noqa: E731
            found[label(*schedule)] = compare(make, reference)
        case = f"{p} threads, {path}{', a stream each' * own_streams}"
        if found:
            tell(answers, case, found, reference, time.monotonic() - begun)
        else:
            answers.row(case, "absent", "no time was left for it")


# --- ranks over MPI ---


def rank_main(payload: dict[str, Any]) -> None:
    """On every rank of a launch. A case that fails ends the launch: ranks may be out of step."""
    deterministic(payload)
    from mpipipe.transport import open_world

    transport = open_world()
    import torch

    for number, (schedule, chunks) in enumerate(payload["schedules"]):
        outcome = train(make_config(schedule, chunks, payload["device"], payload["path"], payload["small"]), transport)
        path = Path(payload["folder"]) / f"{number}-{transport.rank}.pt"
        torch.save(outcome, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    transport.close()


def bits_over_mpi(
    settings: Settings,
    answers: Answers,
    ranks: Sequence[int],
    schedules: Sequence[tuple[str, int]],
    path: str,
    more: dict[str, str] | None = None,
) -> None:
    """A launch for each number of ranks, beside one rank in this process."""
    import torch

    reference = make_reference(settings, answers)
    if reference is None:
        return
    for p in ranks:
        case = f"{p} ranks over MPI, {path if settings['device'] == 'cuda' else 'host'}"
        if left_s(settings) < 12:
            answers.row(case, "absent", "no time was left for it")
            continue
        with tempfile.TemporaryDirectory(prefix="bits-") as folder:
            payload = {name: settings[name] for name in ("device", "small", "kernels")}
            payload |= {"path": path, "schedules": schedules, "folder": folder}
            said = launch(settings, p, [__file__, "ranks", json.dumps(payload)], left_s(settings) - 6, more)
            found = {}
            for number, schedule in enumerate(schedules):
                files = [Path(folder) / f"{number}-{rank}.pt" for rank in range(p)]
                if all(file.exists() for file in files):
                    outcomes = [torch.load(file, weights_only=True) for file in files]
                    found[label(*schedule)] = differences(outcomes, reference)
        print(said.output[-4000:], flush=True)
        if found:
            tell(answers, case, found, reference, said.seconds)
        if said.trouble():
            done = f"after {len(found)} of {len(schedules)} schedules: "
            answers.row(case, "wrong", f"{done}{said.trouble()}")


def check_bits_mpi(settings: Settings, answers: Answers) -> None:
    if settings["launcher"] is None:
        answers.row("ranks over MPI", "absent", "needs MPI ranks")
        return
    bits_over_mpi(settings, answers, (2, 4), SCHEDULES, "staged")


if __name__ == "__main__":
    if sys.argv[1] == "ranks":
        rank_main(json.loads(sys.argv[2]))
    else:
        answer({"bits": check_bits, "bits-mpi": check_bits_mpi})
