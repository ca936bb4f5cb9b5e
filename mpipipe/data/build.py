"""Token files from text, and what a model of bytes can reach at best.

A document is a file, or what lies between the separator lines of one. With a tokenizer of bytes nothing is put between
documents, so that the tokens of one file are the file. With another one its end-of-document token stands between two
documents, where it has one. The start offsets of the documents are kept in the token file.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from mpipipe.data.documents import Document, Progress, Reader, find_documents, find_texts, kept_input
from mpipipe.data.tokenizer import (
    BYTE_TOKENIZER,
    BYTE_VOCAB,
    ByteTokenizer,
    Tokenizer,
    decode_text,
    load_tokenizer,
    train_bpe,
)
from mpipipe.errors import DataError
from mpipipe.formats.tokens import TokensInfo, write_tokens
from mpipipe.formats.whole import Parts
from mpipipe.units import counted

_SLICE = 1 << 22


@dataclass(frozen=True)
class BuiltTokens:
    """What was written: the training file, the validation file where one was asked for, and the file of the tokenizer
    where one was trained.
    """

    train: TokensInfo
    validation: TokensInfo | None
    tokenizer_file: Path | None = None


def build_tokens(
    paths: Sequence[str | Path],
    output: str | Path,
    progress: Progress | None = None,
    *,
    standard_input: IO[bytes] | None = None,
    split: str | None = None,
    tokenizer: str | Path = BYTE_TOKENIZER,
    bpe_vocab: int | None = None,
    validation: str | Path | None = None,
    validation_every: int = 0,
    binary: bool = False,
    overwrite: bool = False,
) -> BuiltTokens:
    """Write ``output``: the token ids of the files, or of ``standard_input`` in their place, and the sources with sizes
    and xxh3 checksums.

    ``split``: a line that separates documents; else a file is a document. ``tokenizer``: ``"bytes"``, ids 0 to 255, or
    a JSON file of the ``tokenizers`` package. ``bpe_vocab``: train a byte-level BPE of that many ids on the documents
    of ``output``; it is kept in the token files and as ``NAME.tokenizer.json`` beside ``output``.

    With ``validation`` the documents number k, 2k, 3k, ... (k = ``validation_every``, counted from 1 over the documents
    that are not empty) go to that file instead. ``binary``: take the bytes of files that are no text too.
    ``progress(done_bytes, total_bytes)`` is called after each document; with a total of 0 while standard input is read.
    Nothing is written before all paths have been found. Raises DataError for a path that is no file, no paths, no byte
    at all, an output that exists or is to be read, a split that leaves one side empty, what is no text (without
    ``binary``; HDF5, or a NUL near the beginning), text that is no UTF-8 for a tokenizer other than bytes, and a
    tokenizer that can't be used; MissingDependencyError where the package for it is absent.
    """
    if validation is None and validation_every:
        raise DataError(f"validation_every = {validation_every}, but no validation file is named")
    if bpe_vocab is not None and str(tokenizer) != BYTE_TOKENIZER:
        raise DataError(f"--tokenizer {tokenizer} and --train-bpe {bpe_vocab}: one tokenizer is taken; leave one out")
    made = _Outputs(Path(output), None if validation is None else Path(validation), bpe_vocab, overwrite)
    if str(tokenizer) != BYTE_TOKENIZER:
        made.check_inputs([Path(tokenizer)])
    with contextlib.ExitStack() as stack:
        if standard_input is None:
            files = find_texts(paths, binary=binary)
            made.check_inputs([file.path for file in files])
        else:
            made.check()
            given = kept_input(standard_input, made.output.parent, progress, binary=binary)
            files = [stack.enter_context(given)]
        documents = find_documents(files, split)
        what = "document" if split is not None or standard_input is not None else "file"
        kept, held = _parted(documents, validation, validation_every, what)
        made.check()
        return made.write(kept, held, tokenizer, progress)


def build_byte_tokens(
    paths: Sequence[str | Path],
    output: str | Path,
    progress: Progress | None = None,
    *,
    validation: str | Path | None = None,
    validation_every: int = 0,
    binary: bool = False,
    overwrite: bool = False,
) -> BuiltTokens:
    """:func:`build_tokens` with a file a document and a byte a token."""
    return build_tokens(
        paths,
        output,
        progress,
        validation=validation,
        validation_every=validation_every,
        binary=binary,
        overwrite=overwrite,
    )


def _parted(
    documents: list[Document], validation: str | Path | None, every: int, what: str
) -> tuple[list[Document], list[Document]]:
    """What goes to training, and what is held out."""
    if validation is None:
        return documents, []
    if every < 2:
        raise DataError(f"{validation}: validation_every is at least 2; {every} was asked for")
    if len(documents) < every:
        raise DataError(
            f"{validation}: with --validation-every {every} nothing of {counted(len(documents), what)} with "
            f"text is held out; give more {what}s or a smaller number"
        )
    return [entry for number, entry in enumerate(documents, 1) if number % every], documents[every - 1 :: every]


@dataclass(frozen=True)
class _Outputs:
    """The files to write."""

    output: Path
    validation: Path | None
    bpe_vocab: int | None
    overwrite: bool

    @property
    def tokenizer_file(self) -> Path | None:
        if self.bpe_vocab is None:
            return None
        return self.output.with_name(f"{self.output.name.removesuffix('.h5')}.tokenizer.json")

    @property
    def names(self) -> list[Path]:
        return [name for name in (self.output, self.validation, self.tokenizer_file) if name is not None]

    def check_inputs(self, inputs: Sequence[Path]) -> None:
        """None is a file that is read: ``--overwrite`` would put tokens in the place of the text."""
        read = {path.resolve() for path in inputs}
        for name in self.names:
            if name.resolve() in read:
                raise DataError(f"{name} is to be read and to be written; name another file with -o or --validation")

    def check(self) -> None:
        """All are different and none is in the way, before any is written."""
        if self.validation is not None and self.validation.resolve() == self.output.resolve():
            raise DataError(f"{self.output} is named for training and for validation")
        for name in self.names:
            if name.exists() and not self.overwrite:
                raise DataError(f"{name}: the file exists; choose another name, or --overwrite to replace it")

    def write(
        self, kept: list[Document], held: list[Document], tokenizer: str | Path, progress: Progress | None
    ) -> BuiltTokens:
        """Choose or train the tokenizer, and write the files; none takes its name before all are written."""
        to_train = _size(kept) if self.bpe_vocab is not None else 0
        reader = Reader(_size(kept) + _size(held) + to_train, progress)
        beside = self.tokenizer_file
        chosen: Tokenizer
        if self.bpe_vocab is not None:
            texts = (decode_text(content, document.where) for document, content in reader.contents(kept))
            chosen = train_bpe(texts, self.bpe_vocab, str(beside))
        else:
            chosen = ByteTokenizer() if str(tokenizer) == BYTE_TOKENIZER else load_tokenizer(tokenizer)
        with Parts() as parts:
            train = self._write_tokens(self.output, kept, reader, chosen, parts)
            held_out = None
            if self.validation is not None:
                held_out = self._write_tokens(self.validation, held, reader, chosen, parts)
            if beside is not None and chosen.json is not None:
                parts.beside(beside).write_text(chosen.json, encoding="utf-8")
            parts.rename()
        return BuiltTokens(train, held_out, beside)

    def _write_tokens(
        self, path: Path, documents: list[Document], reader: Reader, tokenizer: Tokenizer, parts: Parts
    ) -> TokensInfo:
        return write_tokens(
            path,
            _encoded(documents, reader, tokenizer),
            tokenizer.vocab,
            tokenizer.name,
            lambda: reader.sources(documents),
            tokenizer_json=tokenizer.json,
            overwrite=self.overwrite,
            parts=parts,
        )


def _size(documents: Sequence[Document]) -> int:
    return sum(document.stop - document.start for document in documents)


def _encoded(documents: Sequence[Document], reader: Reader, tokenizer: Tokenizer) -> Iterator[npt.NDArray[Any]]:
    """The ids of each document, with the end-of-document token at the end of each but the last."""
    before: npt.NDArray[Any] | None = None
    for document, content in reader.contents(documents):
        ids = tokenizer.encode(content, document.where)
        if tokenizer.end_id is None:
            yield ids
        elif len(ids):
            if before is not None:
                yield np.append(before, np.uint32(tokenizer.end_id))
            before = ids
    if before is not None:
        yield before


def byte_entropies(tokens: npt.NDArray[Any]) -> tuple[float, float]:
    """Unigram entropy H(x) and conditional entropy H(next | previous) of byte tokens, in nats a token, from the
    counts themselves.

    ``tokens``: integers 0 to 255 of shape (tokens,), at least 2. The conditional one is over the pairs of neighbours,
    document borders not regarded. A model that beats the second one has learned more than pairs. Raises DataError for
    fewer tokens or another id.
    """
    if tokens.ndim != 1 or len(tokens) < 2:
        raise DataError(f"entropies need at least 2 tokens; found an array of shape {tokens.shape}")
    pairs = np.zeros(BYTE_VOCAB**2, dtype=np.int64)
    singles = np.zeros(BYTE_VOCAB, dtype=np.int64)
    for first in range(0, len(tokens), _SLICE):
        piece = np.asarray(tokens[first : first + _SLICE + 1], dtype=np.int64)
        if int(piece.min()) < 0 or int(piece.max()) >= BYTE_VOCAB:
            raise DataError(f"token id {int(piece.min() if piece.min() < 0 else piece.max())} is no byte")
        singles += np.bincount(piece[:_SLICE], minlength=BYTE_VOCAB)
        pairs += np.bincount(piece[:-1] * BYTE_VOCAB + piece[1:], minlength=BYTE_VOCAB**2)
    previous = pairs.reshape(BYTE_VOCAB, BYTE_VOCAB).sum(axis=1)
    return _entropy(singles), _entropy(pairs) - _entropy(previous)


def _entropy(counts: npt.NDArray[np.int64]) -> float:
    """Entropy in nats of the distribution of the counts."""
    total = int(counts.sum())
    used = counts[counts > 0].astype(np.float64)
    return math.log(total) - math.fsum(used * np.log(used)) / total
