"""``mpipipe data``: token files from text. Needs neither torch nor MPI."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mpipipe.cli.options import Json, new_group
from mpipipe.cli.output import print_json
from mpipipe.cli.progress import counted_progress
from mpipipe.errors import ConfigError
from mpipipe.units import counted, format_bytes

if TYPE_CHECKING:
    from mpipipe.formats.tokens import TokensFile, TokensInfo

SOURCES_SHOWN = 10
STANDARD_INPUT = "-"

app = new_group("Token files.")


Texts = Annotated[
    list[str],
    typer.Argument(
        metavar="TEXT...",
        help="Files, folders or globs, each file a document; or '-', standard input as one document.",
        show_default=False,
    ),
]
TokenFile = Annotated[
    Path, typer.Option("-o", "--output", metavar="FILE", help="The token file.", show_default=False)
]
Split = Annotated[
    str | None,
    typer.Option(
        "--split",
        metavar="LINE",
        help="A line that separates documents, exactly this; it belongs to none.",
        show_default=False,
    ),
]
TokenizerName = Annotated[
    str, typer.Option("--tokenizer", metavar="NAME", help="'bytes', or a JSON file of the package tokenizers.")
]
BpeVocab = Annotated[
    int | None,
    typer.Option(
        "--train-bpe",
        metavar="VOCAB",
        help="Train a byte-level BPE of so many ids on the text; kept in the token file and beside it.",
        min=257,
        show_default=False,
    ),
]
Validation = Annotated[
    Path | None,
    typer.Option("--validation", metavar="FILE", help="A second token file, held out.", show_default=False),
]
Every = Annotated[
    int,
    typer.Option("--validation-every", metavar="N", help="Every Nth document goes to the validation file.", min=2),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude",
        metavar="NAME",
        help="Leave out files and folders of this name found in folders and by globs; wildcards. Repeatable.",
        show_default=False,
    ),
]
Binary = Annotated[
    bool, typer.Option("--binary", help="Take the bytes of files that are no text too; else they are refused.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")]


@app.command()
def build(
    texts: Texts,
    output: TokenFile,
    split: Split = None,
    tokenizer: TokenizerName = "bytes",
    bpe_vocab: BpeVocab = None,
    validation: Validation = None,
    every: Every = 10,
    exclude: Exclude = None,
    binary: Binary = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Make a token file from text; by default one token a byte (model.vocab = 256)."""
    from mpipipe.data import build_tokens, find_files

    if STANDARD_INPUT in texts and len(texts) > 1:
        raise ConfigError("'-', standard input, is given beside files", value=texts, allowed="'-' alone, or files")
    from_input = texts == [STANDARD_INPUT]
    files = [] if from_input else find_files(texts, exclude or ())
    with counted_progress("reading") as progress:
        built = build_tokens(
            files,
            output,
            progress,
            standard_input=sys.stdin.buffer if from_input else None,
            split=split,
            tokenizer=tokenizer,
            bpe_vocab=bpe_vocab,
            validation=validation,
            validation_every=0 if validation is None else every,
            binary=binary,
            overwrite=overwrite,
        )
    made = {"train": built.train, "validation": built.validation}
    if as_json:
        print_json({name: _as_object(info) if info else None for name, info in made.items()})
        return
    for info in made.values():
        if info is not None:
            print(f"{info.path}: {_size(info)}, vocabulary {info.vocab}")
    if built.tokenizer_file is not None:
        print(f"{built.tokenizer_file}: the tokenizer; the token file holds it too")
    if bpe_vocab is not None and built.train.vocab < bpe_vocab:
        print(f"the text gives no more than {built.train.vocab} of the {bpe_vocab} token ids asked for")


@app.command("info")
def show_info(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A token file.", show_default=False)],
    entropy: Annotated[
        bool, typer.Option("--entropy", help="Also the entropies of single bytes and of pairs, in nats a token.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what a token file holds and where it comes from."""
    from mpipipe.formats.tokens import TokensFile

    tokens = TokensFile(file)
    info = tokens.info
    figures = _entropies(tokens) if entropy else {}
    if as_json:
        print_json(_as_object(info) | figures)
        return
    print(f"{info.path}: {_size(info)}, stored as {info.dtype}")
    held = " (held in the file)" if info.has_tokenizer else ""
    print(f"tokenizer {info.tokenizer}{held}, vocabulary {info.vocab}, largest id {info.max_id}")
    print(
        f"{counted(info.num_documents, 'document')}, in tokens: shortest {info.shortest_document}, "
        f"longest {info.longest_document}, mean {info.mean_document:.1f}"
    )
    for name, value in figures.items():
        print(f"{name} {value:.4f}")
    for source in info.sources[:SOURCES_SHOWN]:
        print(f"{source.checksum}  {format_bytes(source.size_bytes):>10}  {source.path}")
    if len(info.sources) > SOURCES_SHOWN:
        print(f"and {counted(len(info.sources) - SOURCES_SHOWN, 'source')} more; --json lists all")


def _size(info: TokensInfo) -> str:
    return f"{counted(info.length, 'token')} of {counted(info.num_documents, 'document')}"


def _entropies(tokens: TokensFile) -> dict[str, float]:
    """What a model that knows single bytes, or pairs of them, reaches at best. Raises DataError for other tokens."""
    from mpipipe.data import byte_entropies

    unigram, bigram = byte_entropies(tokens.read(0, tokens.length))
    return {"unigram_entropy_nats": unigram, "bigram_entropy_nats": bigram}


def _as_object(info: TokensInfo) -> dict[str, Any]:
    return {
        "path": str(info.path),
        "tokens": info.length,
        "vocab": info.vocab,
        "max_id": info.max_id,
        "dtype": str(info.dtype),
        "tokenizer": info.tokenizer,
        "has_tokenizer": info.has_tokenizer,
        "documents": info.num_documents,
        "shortest_document": info.shortest_document,
        "longest_document": info.longest_document,
        "mean_document": info.mean_document,
        "sources": [
            {"path": source.path, "bytes": source.size_bytes, "checksum": source.checksum} for source in info.sources
        ],
    }
