"""Text from a checkpoint, in one process, whatever number of ranks it was saved at."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from mpipipe.config import Config
from mpipipe.data import ByteTokenizer, TextTokenizer, Tokenizer, expand_paths, load_tokenizer
from mpipipe.errors import CheckpointError, CheckpointMismatchError, CheckpointNotFoundError, ConfigError, DataError
from mpipipe.formats.checkpoint import PARAMETERS, Manifest, find_checkpoint, read_manifest, read_tensors
from mpipipe.formats.hdf5 import is_hdf5
from mpipipe.formats.paths import RunPaths
from mpipipe.formats.tokens import TokensFile
from mpipipe.model import ModelLayers, gpt2_layers

_NUM_BYTES = 256


def generate(
    run_dir: str | Path,
    prompt: str,
    max_tokens: int,
    checkpoint_step: int | None = None,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    tokenizer: str | Path | None = None,
) -> str:
    """What the model writes after ``prompt``, without the prompt: ``max_tokens`` tokens.

    ``tokenizer``: a JSON file of the ``tokenizers`` package or a token file; by default the one that the run's training
    tokens were made with (:func:`find_tokenizer`).

    With ``temperature`` 0 each token is the most probable one, of equals the smaller id. Above 0 it is drawn from the
    softmax of the scores over ``temperature`` (1: the model's own probabilities), by a generator of its own: one
    ``seed``, one text. The model sees the last model.sequence tokens; what is no UTF-8 becomes U+FFFD.
    ``checkpoint_step``: the newest usable checkpoint by default. The model is that of the run file kept in the
    checkpoint, computed in float32 on the CPU.

    Raises CheckpointNotFoundError, the errors of reading a checkpoint, CheckpointMismatchError where its parameters
    are not exactly those of its model, ConfigError for an empty prompt, a tokenizer that is not found or does not fit
    model.vocab, and a number that can't be used; DataError for a tokenizer that can't be read.
    """
    _check_numbers(max_tokens, temperature, seed)
    paths = RunPaths(Path(run_dir))
    if not paths.root.is_dir():
        raise CheckpointNotFoundError(f"{paths.root}: there is no such run folder")
    folder = find_checkpoint(paths.checkpoints, checkpoint_step)
    manifest = read_manifest(folder)
    config = Config.from_toml(manifest.config_text, file=str(folder))
    config.needed_model(folder)
    words = find_tokenizer(config, tokenizer)
    tokens = prompt_tokens(prompt, words, config.needed_model().vocab)
    layers = load_layers(folder, manifest, gpt2_layers(config.needed_model(), config.run.seed))
    choose = sampler(temperature, seed)
    found = continue_tokens(layers, tokens, max_tokens, config.needed_model().sequence, choose)
    return _added_text(words, tokens, found)


def _check_numbers(max_tokens: int, temperature: float, seed: int) -> None:
    if max_tokens < 0:
        raise ConfigError(f"{max_tokens} tokens were asked for", value=max_tokens, allowed="max_tokens of 0 or more")
    if not 0 <= temperature < math.inf:
        raise ConfigError(
            f"a temperature of {temperature:g} was asked for",
            value=temperature,
            allowed="0, always the most probable token, or a number above 0",
        )
    if not 0 <= seed < 2**63:
        raise ConfigError(f"a seed of {seed} was asked for", value=seed, allowed="a whole number, 0 to 2^63 - 1")


def find_tokenizer(config: Config, given: str | Path | None = None) -> Tokenizer:
    """The tokenizer of ``given``, a JSON file or a token file; without it, that of the run's training tokens: the one
    in the first file of data.train where that is there, else bytes for a model.vocab of up to 256.

    Raises ConfigError where neither says which it is, DataError for a file that can't be used.
    """
    if given is not None:
        return _tokenizer_of_file(Path(given))
    try:
        file = TokensFile(expand_paths(config.data.train, "data.train")[0])
    except DataError as error:
        if config.needed_model().vocab <= _NUM_BYTES:
            return ByteTokenizer()
        raise _unknown_tokenizer(config, str(error)) from error
    found = _in_token_file(file)
    if found is not None:
        return found
    if config.needed_model().vocab <= _NUM_BYTES:
        return ByteTokenizer()
    raise _unknown_tokenizer(config, f"{file.path} names its tokenizer, {file.tokenizer}, and lacks it")


def _unknown_tokenizer(config: Config, why: str) -> ConfigError:
    return ConfigError(
        f"the tokenizer of the text is not known: {why}",
        key="data.train",
        value=config.data.train,
        allowed="start where the training token file is found, or name the tokenizer's JSON file or a token file made "
        "with it: --tokenizer FILE",
    )


def _in_token_file(file: TokensFile) -> Tokenizer | None:
    """The tokenizer that a token file holds or is of; None where it only names another one."""
    text = file.tokenizer_json
    if text is not None:
        return TextTokenizer(text, f"{file.path} (its tokenizer {file.tokenizer})")
    return ByteTokenizer() if file.tokenizer == ByteTokenizer.name else None


def _tokenizer_of_file(path: Path) -> Tokenizer:
    if str(path) == ByteTokenizer.name:
        return ByteTokenizer()
    if path.is_file() and is_hdf5(path):
        found = _in_token_file(TokensFile(path))
        if found is None:
            raise DataError(f"{path} names its tokenizer and lacks it; name the tokenizer's JSON file")
        return found
    return load_tokenizer(path)


def prompt_tokens(prompt: str, tokenizer: Tokenizer, vocab: int) -> list[int]:
    """The prompt's token ids, all below ``vocab``. Raises ConfigError."""
    content = np.frombuffer(prompt.encode(), dtype=np.uint8)
    tokens = [int(number) for number in tokenizer.encode(content, "the prompt")]
    if not tokens:
        raise ConfigError("the prompt is empty", value=prompt, allowed="at least one character")
    if max(tokens) >= vocab:
        what = "byte" if tokenizer.json is None else "token id"
        raise ConfigError(
            f"the prompt holds the {what} {max(tokens)}, which model.vocab = {vocab} does not have",
            value=prompt,
            allowed=f"text of {what}s below {vocab}; the tokenizer is {tokenizer.name}",
        )
    return tokens


def _added_text(tokenizer: Tokenizer, before: list[int], found: list[int]) -> str:
    """The text of ``found`` as it stands after ``before``: some tokenizers drop a blank at the start of a text."""
    if tokenizer.json is None:
        return tokenizer.decode(found)
    head, whole = tokenizer.decode(before), tokenizer.decode(before + found)
    return whole[len(head) :] if whole.startswith(head) else tokenizer.decode(found)


def load_layers(folder: Path, manifest: Manifest, model: ModelLayers) -> list[nn.Module]:
    """All layers, built here, with the checkpoint's parameters, every name and shape compared. A tied copy takes the
    primary's values where the checkpoint keeps one only.
    """
    layers = [factory() for factory in model.factories]
    targets = {
        f"{name}.{local}": parameter
        for name, layer in zip(model.names, layers, strict=True)
        for local, parameter in layer.named_parameters()
    }
    primary = {copy: first for first, copy in model.tied}
    wanted: dict[str, list[str]] = {}  # stored name -> the parameters that take it
    missing = []
    for name in targets:
        entry = manifest.find(PARAMETERS + name) or manifest.find(PARAMETERS + primary.get(name, name))
        if entry is None:
            missing.append(name)
        else:
            wanted.setdefault(entry.name, []).append(name)
    unexpected = sorted(name for name in manifest.tensors if name.startswith(PARAMETERS) and name not in wanted)
    if missing or unexpected:
        raise CheckpointMismatchError(
            f"{folder}: the parameters are not those of its model: {len(missing)} missing {missing[:5]}, "
            f"{len(unexpected)} unexpected {unexpected[:5]}"
        )
    with torch.no_grad():
        for entry, array in read_tensors(folder, [manifest.tensors[name] for name in wanted]):
            for name in wanted[entry.name]:
                shape = tuple(targets[name].shape)
                if entry.shape != shape or entry.dtype != "float32":
                    raise CheckpointMismatchError(
                        f"{folder}: {entry.name} is {entry.dtype} {entry.shape}, the model's {name} float32 {shape}"
                    )
                targets[name].copy_(torch.from_numpy(array))
    return layers


def sampler(temperature: float, seed: int) -> Callable[[Tensor], int]:
    """What chooses a token from its scores (vocab,): the largest for ``temperature`` 0, else a draw from the softmax
    of the scores over it, taken in float64.
    """
    if temperature == 0:
        return lambda scores: int(scores.argmax())
    generator = torch.Generator().manual_seed(seed)

    def draw(scores: Tensor) -> int:
        exact = scores.double()
        probabilities = torch.softmax((exact - exact.max()) / temperature, dim=0)
        return int(torch.multinomial(probabilities, 1, generator=generator))

    return draw


@torch.no_grad()
def continue_tokens(
    layers: list[nn.Module], tokens: list[int], max_tokens: int, sequence: int, choose: Callable[[Tensor], int]
) -> list[int]:
    """The ``max_tokens`` tokens after ``tokens`` that ``choose`` takes; the context is the last ``sequence`` tokens."""
    found: list[int] = []
    for _ in range(max_tokens):
        x: Tensor = torch.tensor([(tokens + found)[-sequence:]], dtype=torch.int64)
        for layer in layers:
            x = layer(x)
        scores = x[0, -1]
        if not math.isfinite(float(scores.sum())):
            raise CheckpointError(f"the model gives scores that are not finite at token {len(found)}")
        found.append(choose(scores))
    return found
