"""Text from a checkpoint: a model trained here on one sentence says it again; checkpoints of other models are
refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import little
import numpy as np
import pytest
import torch

from mpipipe.cli import main
from mpipipe.config import Config
from mpipipe.errors import CheckpointMismatchError, CheckpointNotFoundError, ConfigError
from mpipipe.formats.checkpoint import make_manifest, write_manifest, write_master, write_shard
from mpipipe.formats.paths import RunPaths
from mpipipe.generate import generate, sampler
from mpipipe.model import gpt2_layers, token_loss
from mpipipe.trainer import Trainer
from mpipipe.transport import solo

TEXT = b"pipelines "
MODEL = {"layers": 1, "hidden": 32, "heads": 2, "vocab": 128, "sequence": 8}

Tensors = dict[str, np.ndarray]


def config(**model: object) -> Config:
    return Config.from_tables({"run": {"seed": 3}, "model": {**MODEL, **model}})


def trained() -> Tensors:
    """Parameters by name after a few steps on the repeated text; the tied weight once."""
    model = gpt2_layers(config().model, 3)
    layers = [factory() for factory in model.factories]
    layers[-1].weight = layers[0].tokens.weight  # type: ignore[union-attr]
    parameters = {
        f"{name}.{local}": parameter
        for name, layer in zip(model.names, layers, strict=True)
        for local, parameter in layer.named_parameters()
    }
    optimizer = torch.optim.AdamW({id(p): p for p in parameters.values()}.values(), lr=1e-2)
    tokens = torch.tensor(list(TEXT * 3))
    windows = torch.stack([tokens[start : start + 9] for start in range(10)])
    for _ in range(300):
        x = windows[:, :-1]
        for layer in layers:
            x = layer(x)
        loss, count = token_loss(x, windows[:, 1:])
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
    del parameters["head.weight"]
    return {f"/parameters/{name}": parameter.detach().numpy() for name, parameter in parameters.items()}


@pytest.fixture(scope="module")
def parameters() -> Tensors:
    return trained()


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    def write(step: int, tensors: Tensors, of: Config | None = None, alias: bool = True) -> Path:
        folder = RunPaths(tmp_path).checkpoint(step)
        folder.mkdir(parents=True)
        names = list(tensors)
        entries = []
        for number, part in enumerate((names[::2], names[1::2])):  # as from two ranks
            entries += write_shard(folder / f"shard-{number:04d}.h5", {name: tensors[name] for name in part})
        files = {path.name: path.stat().st_size for path in folder.iterdir()}
        aliases = {"/parameters/embedding.tokens.weight": ["/parameters/head.weight"]} if alias else {}
        manifest = make_manifest(step, files, entries, aliases, {}, (of or config()).to_toml())
        write_master(folder, manifest)
        write_manifest(folder, manifest)
        return tmp_path

    return write


def test_the_sentence_goes_on_also_past_the_models_sequence(save: Callable[..., Path], parameters: Tensors) -> None:
    run_dir = save(7, {**parameters, "/optimizer/exp_avg/head.norm.weight": np.zeros(32, dtype=np.float32)})
    assert generate(run_dir, "pipe", 16) == "lines pipelines "
    assert generate(run_dir, "elines pipel", 5) == "ines "  # a prompt longer than the sequence
    assert generate(run_dir, "pipe", 0) == ""


def test_newest_or_named_checkpoint(save: Callable[..., Path], parameters: Tensors) -> None:
    zeros = {name: np.zeros_like(array) for name, array in parameters.items()}
    run_dir = save(2, parameters)
    save(10, zeros, alias=False)
    (run_dir / "checkpoints" / "step-00000011").mkdir()  # no manifest: no checkpoint
    assert generate(run_dir, "pipe", 3) == "\0\0\0"
    assert generate(run_dir, "pipe", 3, checkpoint_step=2) == "lin"
    with pytest.raises(CheckpointNotFoundError, match=r"no usable checkpoint of step 3 \(usable steps: 2, 10\)"):
        generate(run_dir, "pipe", 3, checkpoint_step=3)
    with pytest.raises(CheckpointNotFoundError, match=r"of step 11 .*manifest\.json"):
        generate(run_dir, "pipe", 3, checkpoint_step=11)


def test_no_run_and_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no such run folder"):
        generate(tmp_path / "none", "a", 1)
    with pytest.raises(CheckpointNotFoundError, match=r"no usable checkpoint \(usable steps: none\)"):
        generate(tmp_path, "a", 1)


def test_parameters_of_another_model_are_refused(save: Callable[..., Path], parameters: Tensors) -> None:
    less = {name: array for name, array in parameters.items() if not name.endswith("head.norm.bias")}
    run_dir = save(1, less)
    save(2, {**parameters, "/parameters/blocks.1.norm1.weight": np.ones(32, dtype=np.float32)})
    save(3, {**parameters, "/parameters/head.norm.bias": np.ones(31, dtype=np.float32)})
    save(4, parameters, of=config(tie_embeddings=False), alias=False)
    for step, message in (
        (1, r"1 missing \['head\.norm\.bias'\], 0 unexpected"),
        (2, r"0 missing \[\], 1 unexpected \['/parameters/blocks\.1\.norm1\.weight'\]"),
        (3, r"head\.norm\.bias is float32 \(31,\), the model's head\.norm\.bias float32 \(32,\)"),
        (4, r"1 missing \['head\.weight'\]"),
    ):
        with pytest.raises(CheckpointMismatchError, match=message):
            generate(run_dir, "pipe", 1, checkpoint_step=step)


def test_prompts_that_have_no_tokens(save: Callable[..., Path], parameters: Tensors) -> None:
    run_dir = save(1, parameters)
    with pytest.raises(ConfigError, match="the prompt is empty"):
        generate(run_dir, "", 1)
    with pytest.raises(ConfigError, match=r"the prompt holds the byte 195, which model\.vocab = 128 does not have"):
        generate(run_dir, "\u00e9", 1)
    with pytest.raises(ConfigError, match=r"-1 tokens were asked for .*max_tokens"):
        generate(run_dir, "a", -1)
    for temperature in (-0.5, math.nan, math.inf):
        with pytest.raises(ConfigError, match=rf"a temperature of {temperature} was asked for .allowed: 0, always"):
            generate(run_dir, "a", 1, temperature=temperature)
    for seed in (-1, 2**63):
        with pytest.raises(ConfigError, match=f"a seed of {seed} was asked for"):
            generate(run_dir, "a", 1, temperature=1.0, seed=seed)
    save(2, parameters, of=config(vocab=300))
    with pytest.raises(ConfigError, match=r"data\.train: the tokenizer .*: no file is named.*--tokenizer FILE"):
        generate(run_dir, "a", 1)


def test_a_sample_is_the_same_for_the_same_seed_and_greedy_as_the_temperature_falls(
    save: Callable[..., Path], parameters: Tensors
) -> None:
    run_dir = save(1, parameters)
    drawn = [generate(run_dir, "pipe", 40, temperature=1.5, seed=seed) for seed in (0, 0, 1)]
    torch.manual_seed(9)  # torch's own generator has no part in it
    assert drawn[0] == drawn[1] == generate(run_dir, "pipe", 40, temperature=1.5)
    assert drawn[0] != drawn[2]
    for temperature in (1e-3, 1e-310):
        assert generate(run_dir, "pipe", 16, temperature=temperature, seed=5) == "lines pipelines "


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_are_those_of_the_softmax(temperature: float) -> None:
    probabilities = torch.tensor([0.6, 0.3, 0.1, 0.0])
    expected = probabilities.double() ** (1 / temperature)
    expected /= expected.sum()
    choose = sampler(temperature, 7)
    scores = probabilities.log() + 1000
    draws = torch.bincount(torch.tensor([choose(scores) for _ in range(20_000)]), minlength=4) / 20_000
    assert draws.tolist() == pytest.approx(expected.tolist(), abs=0.015)  # four standard deviations
    assert draws[3] == 0


def test_temperature_and_seed_on_the_command_line(
    save: Callable[..., Path], parameters: Tensors, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = save(1, parameters)
    arguments = ["generate", str(run_dir), "--prompt", "pipe", "--max-tokens", "20"]
    assert main([*arguments, "--temperature", "1.5", "--seed", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == generate(run_dir, "pipe", 20, temperature=1.5, seed=3)
    assert main(arguments) == 0
    assert capsys.readouterr().out == "pipe" + generate(run_dir, "pipe", 20) + "\n"
    assert main([*arguments, "--temperature", "-1"]) == 2
    assert "error: a temperature of -1 was asked for (allowed: 0, " in capsys.readouterr().err
    assert main([*arguments[:3], ""]) == 2
    assert capsys.readouterr().err == "error: the prompt is empty (allowed: at least one character)\n"


def test_a_run_of_a_scripts_layers_is_refused_in_words(tmp_path: Path) -> None:
    trainer = Trainer(little.config(run_dir=str(tmp_path)), [little.linear()], little.square_loss, transport=solo())
    trainer.step(little.batch(0))
    trainer.save()
    with pytest.raises(ConfigError) as caught:
        generate(tmp_path, "a", 1)
    assert str(caught.value).startswith(f"{RunPaths(tmp_path).checkpoint(1)}: model: this section is required here: ")
    assert str(caught.value).endswith("A run whose layers come from a script has none, and this verb can't know them")
