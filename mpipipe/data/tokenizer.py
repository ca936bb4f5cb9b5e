"""Text to token ids and back: bytes, or a tokenizer of the ``tokenizers`` package (the extra ``hf``), which is imported
in this file only and only inside its functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mpipipe.errors import DataError, MissingDependencyError

BYTE_VOCAB = 256
BYTE_TOKENIZER = "bytes"
END_OF_DOCUMENT = "<|endoftext|>"
SMALLEST_BPE_VOCAB = BYTE_VOCAB + 1

_END_TOKENS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>")  # GPT-2 and ours, Llama 3, Llama 2, Gemma
_PIECE_CHARACTERS = 1 << 20

Bytes = npt.NDArray[np.uint8]


class Tokenizer(Protocol):
    """``name``: for messages and the token file. ``vocab``: number of ids. ``json``: the tokenizer's text, None for
    bytes. ``end_id``: the end-of-document token, None without one.
    """

    name: str
    vocab: int
    json: str | None
    end_id: int | None

    def encode(self, content: Bytes, where: str) -> npt.NDArray[Any]:
        """Ids (tokens,) of a document of UTF-8 bytes (size,); ``where`` names it in messages."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; what is no UTF-8 becomes U+FFFD."""


class ByteTokenizer:
    """A token is a byte, whatever the bytes are."""

    name, vocab = BYTE_TOKENIZER, BYTE_VOCAB
    json: str | None = None
    end_id: int | None = None

    def encode(self, content: Bytes, where: str) -> npt.NDArray[Any]:
        """The bytes themselves."""
        return content

    def decode(self, ids: Sequence[int]) -> str:
        """An id above 255 is no byte, and becomes U+FFFD."""
        return bytes(number if number < BYTE_VOCAB else 0xFF for number in ids).decode("utf-8", errors="replace")


class TextTokenizer:
    """A tokenizer of the ``tokenizers`` package, from its JSON text.

    Nothing is put before or after a text, cut off or padded, and a text that spells a special token stays text. Raises
    DataError for a text that is no tokenizer, MissingDependencyError without the package.
    """

    def __init__(self, text: str, name: str) -> None:
        package = _package()
        try:
            self._tokenizer = package.Tokenizer.from_str(text)
        except Exception as error:  # the package raises plain Exception
            raise DataError(f"{name} holds no tokenizer that the package tokenizers can read ({error})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise DataError(f"{name} holds a tokenizer without any token")
        self.name = name
        self.vocab = max(ids.values()) + 1
        self.json: str | None = text
        self.end_id: int | None = next((ids[token] for token in _END_TOKENS if token in ids), None)
        self._may_cut = _may_cut(json.loads(text))

    def encode(self, content: Bytes, where: str) -> npt.NDArray[Any]:
        """uint32 (tokens,). Raises DataError for bytes that are no UTF-8, with the position of the first."""
        text = decode_text(content, where)
        pieces = cut(text) if self._may_cut else [text]
        found = [np.asarray(self._ids(piece), dtype=np.uint32) for piece in pieces if piece]
        return np.concatenate(found) if found else np.zeros(0, dtype=np.uint32)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens are shown; ids that the tokenizer does not have give nothing."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a JSON file of the ``tokenizers`` package. Raises DataError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"tokenizer file {path} does not exist (current folder: {Path.cwd()})") from None
    except (IsADirectoryError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is no tokenizer file of JSON text ({error})") from error
    return TextTokenizer(text, str(path))


def train_bpe(texts: Iterable[str], vocab: int, name: str) -> Tokenizer:
    """A byte-level BPE tokenizer (GPT-2's cut into words, every byte a token) with an end-of-document token, of at most
    ``vocab`` ids: fewer where the text has no more pairs to merge. Raises DataError for fewer than 257.
    """
    if vocab < SMALLEST_BPE_VOCAB:
        raise DataError(
            f"a byte-level BPE of {vocab} ids was asked for; it has at least {SMALLEST_BPE_VOCAB}: "
            f"{BYTE_VOCAB} bytes and {END_OF_DOCUMENT}"
        )
    package = _package()
    byte_level = package.pre_tokenizers.ByteLevel
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in cut(text)), trainer)
    return TextTokenizer(str(tokenizer.to_str()), name)


def decode_text(content: Bytes, where: str) -> str:
    """The text of UTF-8 bytes. Raises DataError with the position of the first byte that is none."""
    try:
        return content.tobytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {error.start} is no UTF-8 ({error.reason}); a tokenizer of text needs UTF-8: convert the "
            "file, leave it out, or take --tokenizer bytes"
        ) from error


def cut(text: str, characters: int = _PIECE_CHARACTERS) -> Iterator[str]:
    """``text`` in pieces of at least ``characters``, cut after single line ends between visible characters, where
    GPT-2's cut into words has a border too: the tokens are those of the whole, at a fraction of the memory.
    """
    begin = 0
    while (end := _border(text, begin + characters)) < len(text):
        yield text[begin:end]
        begin = end
    yield text[begin:]


def _border(text: str, start: int) -> int:
    """The first position from ``start`` on that a piece may begin at; the length of the text without one."""
    end = max(start, 2)
    while 0 < (end := text.find("\n", end - 1) + 1) < len(text):
        if not text[end - 2].isspace() and not text[end].isspace():
            return end
        end += 1
    return len(text)


def _may_cut(tokenizer: dict[str, Any]) -> bool:
    """Whether a tokenizer gives the same tokens for the pieces of :func:`cut` as for the whole text."""
    before = tokenizer.get("pre_tokenizer") or {}
    return (
        before.get("type") == "ByteLevel"
        and not before.get("add_prefix_space", True)
        and before.get("use_regex", True)
        and not tokenizer.get("normalizer")
        and all(token.get("special") for token in tokenizer.get("added_tokens") or ())
    )


def _package() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise MissingDependencyError(
            "a tokenizer other than bytes needs tokenizers, which is not installed: pip install 'mpipipe[hf]'"
        ) from error
    return tokenizers
