"""Check of ``device_check.py``: what the engine costs at one rank, beside a plain torch loop."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from device_check_answers import Answers, Settings, answer, left_s

GOAL = 1.03
"""Of the engine's step over the plain loop's."""
SAME_LOSS = 2e-3  # relative; the loops add up in other orders, and round to bfloat16 in other places


def case_of(device: str, small: bool) -> dict[str, Any]:
    """The model and batch: 350 million parameters, unless ``small``."""
    if device == "cpu":
        model = {"layers": 2, "hidden": 32, "heads": 2, "vocab": 128, "sequence": 16}
        return {"model": model, "microbatch": 1, "m": 4, "warm": 1, "steps": 1, "rounds": 2}
    if small:
        model = {"layers": 8, "hidden": 512, "heads": 8, "vocab": 8192, "sequence": 256}
        return {"model": model, "microbatch": 4, "m": 8, "warm": 3, "steps": 3, "rounds": 6}
    model = {"layers": 24, "hidden": 1024, "heads": 16, "vocab": 50304, "sequence": 1024}
    return {"model": model, "microbatch": 4, "m": 8, "warm": 3, "steps": 3, "rounds": 6}


def config_of(case: dict[str, Any], device: str, folder: str, **keys: Any) -> Any:
    """Further settings as ``section__key=value``."""
    from mpipipe.config import Config

    tables: dict[str, Any] = {
        "run": {"seed": 1, "steps": 1000, "dir": folder},
        "model": case["model"] | {"tie_embeddings": True},
        "batch": {"sequences": case["m"] * case["microbatch"], "microbatch": case["microbatch"]},
        "pipeline": {"schedule": "1f1b"},
        "optimizer": {"lr": 1e-4},
        "trace": {"enabled": True},
        "comm": {"device": device, "path": "staged" if device == "cuda" else "auto", "timeout_s": 60.0},
    }
    for name, value in keys.items():
        section, key = name.split("__")
        tables[section][key] = value
    return Config.from_tables(tables)


def in_bfloat16(make: Callable[[], Any], device: str) -> Callable[[], Any]:
    """The layer that ``make`` makes, with matrix products in bfloat16; its parameters stay float32."""
    import torch

    def made() -> Any:
        module = make()
        module.forward = torch.autocast(device, dtype=torch.bfloat16)(module.forward)
        return module

    return made


def make_engine(config: Any, transport: Any, device: str) -> Any:
    """mpipipe's trainer."""
    from mpipipe.model import gpt2_layers, token_loss
    from mpipipe.trainer import Trainer

    layers = gpt2_layers(config.model, config.run.seed)
    return Trainer(
        config,
        [in_bfloat16(make, device) for make in layers.factories],
        token_loss,
        tied=layers.tied,
        names=layers.names,
        descriptions=layers.descriptions,
        transport=transport,
    )


def make_batch(config: Any) -> Any:
    """The same at every step, on the CPU."""
    import torch

    size = (config.batch.sequences, config.model.sequence + 1)
    tokens = torch.randint(0, config.model.vocab, size, generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class PlainLoop:
    """What a user writes without mpipipe: the same layers one after another, microbatches added up, fused AdamW. With
    ``norm`` also the norm of the whole gradient, which the trainer tells at every step.
    """

    def __init__(self, config: Any, device: str) -> None:
        import torch

        from mpipipe.model import gpt2_layers

        self._torch, self._device = torch, device
        layers = gpt2_layers(config.model, config.run.seed)
        self._modules = torch.nn.ModuleList([make() for make in layers.factories]).to(device)
        self._modules[-1].weight = self._modules[0].tokens.weight
        parameters = list(self._modules.parameters())
        self._parameters = parameters
        section = config.optimizer
        groups = [
            {"params": [one for one in parameters if one.dim() >= 2], "weight_decay": section.weight_decay},
            {"params": [one for one in parameters if one.dim() < 2], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)
        self._microbatch = config.batch.microbatch
        self.num_parameters = sum(one.numel() for one in parameters)

    def step(self, batch: Any, norm: bool = False) -> float:
        """The mean loss of the step."""
        torch = self._torch
        inputs, targets = (tensor.to(self._device) for tensor in batch)
        pieces = inputs.split(self._microbatch)
        total = torch.zeros((), device=self._device)
        for x, y in zip(pieces, targets.split(self._microbatch), strict=True):
            with torch.autocast(self._device, dtype=torch.bfloat16):
                for module in self._modules:
                    x = module(x)
            loss = torch.nn.functional.cross_entropy(x.flatten(0, 1).float(), y.flatten()) / len(pieces)
            loss.backward()
            total += loss.detach()
        if norm:
            torch.nn.utils.get_total_norm([one.grad for one in self._parameters], foreach=True).item()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(total.item())


def timed_ms(step: Callable[[], Any], steps: int, settle: Callable[[], None]) -> float:
    """Milliseconds a step."""
    settle()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    settle()
    return 1e3 * (time.perf_counter() - begun) / steps


def check_engine(settings: Settings, answers: Answers) -> None:
    import torch

    from mpipipe.transport import solo

    device = settings["device"]
    case = case_of(device, settings["small"])
    settle = torch.cuda.synchronize if device == "cuda" else lambda: None
    with tempfile.TemporaryDirectory(prefix="engine-") as folder:
        config = config_of(case, device, str(Path(folder) / "run"))
        batch = make_batch(config)
        plain = PlainLoop(config, device)
        engine = make_engine(config, solo(), device)
        loops: dict[str, Callable[[], Any]] = {
            "engine": lambda: engine.step(batch),
            "plain": lambda: plain.step(batch),
            "plain with the norm": lambda: plain.step(batch, norm=True),
        }
        losses = {name: [loops[name]() for _ in range(case["warm"])] for name in ("engine", "plain")}
        loops["plain with the norm"]()
        _compare_losses(answers, losses)
        found: dict[str, list[float]] = {name: [] for name in loops}
        for number in range(case["rounds"]):
            order = list(loops) if number % 2 == 0 else list(loops)[::-1]
            for name in order:
                found[name].append(timed_ms(loops[name], case["steps"], settle))
            print(", ".join(f"{name} {taken[-1]:.1f} ms" for name, taken in found.items()), flush=True)
            if left_s(settings) < 10 + 2e-3 * case["steps"] * sum(taken[-1] for taken in found.values()):
                break
        engine.close()
        _tell_ratio(settings, answers, case, found, plain.num_parameters)


def _compare_losses(answers: Answers, losses: dict[str, list[float]]) -> None:
    far = max(abs(a - b) / abs(b) for a, b in zip(losses["engine"], losses["plain"], strict=True))
    shown = "; ".join(f"{name} {', '.join(f'{loss:.5f}' for loss in values)}" for name, values in losses.items())
    level = "ok" if far <= SAME_LOSS else "wrong"
    answers.row("losses", level, f"{shown}: {far:.1e} apart, {SAME_LOSS:.0e} allowed", apart=far)


def _tell_ratio(
    settings: Settings, answers: Answers, case: dict[str, Any], found: dict[str, list[float]], parameters: int
) -> None:
    middle = {name: statistics.median(taken) for name, taken in found.items()}
    ratios = [a / b for a, b in zip(found["engine"], found["plain"], strict=True)]
    ratio = statistics.median(ratios)
    over_norm = statistics.median(a / b for a, b in zip(found["engine"], found["plain with the norm"], strict=True))
    tokens = case["m"] * case["microbatch"] * case["model"]["sequence"]
    flops = 6 * parameters * tokens + 12 * case["model"]["layers"] * case["model"]["hidden"] * (
        case["model"]["sequence"] * tokens
    )
    text = (
        f"{', '.join(f'{name} {ms:.2f} ms' for name, ms in middle.items())} a step; engine over plain {ratio:.4f} "
        f"({min(ratios):.4f} to {max(ratios):.4f} over {len(ratios)} rounds of {case['steps']} steps), goal {GOAL}; "
        f"over plain with the norm {over_norm:.4f}; {parameters / 1e6:.0f} million parameters, m = {case['m']} of "
        f"{case['microbatch']} x {case['model']['sequence']} tokens, bfloat16 products, fused AdamW counted, no "
        f"clipping, trace on; engine {1e-9 * flops / middle['engine']:.3g} TFLOP/s, "
        f"{1e3 * tokens / middle['engine']:.4g} tokens/s"
    )
    on_cpu = settings["device"] == "cpu"
    level = "ok" if ratio <= GOAL or on_cpu else "missed"
    answers.row("engine over plain", level, text + "; a dry run: the goal is a GPU's" * on_cpu, ratio=ratio,
                ratios=ratios, over_norm=over_norm, ms=middle, sizes=case)  # fmt: skip


if __name__ == "__main__":
    answer({"engine": check_engine})
