"""Token data: deterministic sampling of windows, batches from token files, tokenizers, and token files from text."""

from mpipipe.data.build import BuiltTokens, build_byte_tokens, build_tokens, byte_entropies
from mpipipe.data.documents import find_files
from mpipipe.data.sampling import permute, sample_windows
from mpipipe.data.source import Batch, TokenSource, expand_paths
from mpipipe.data.tokenizer import ByteTokenizer, TextTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "BuiltTokens",
    "ByteTokenizer",
    "TextTokenizer",
    "TokenSource",
    "Tokenizer",
    "build_byte_tokens",
    "build_tokens",
    "byte_entropies",
    "expand_paths",
    "find_files",
    "load_tokenizer",
    "permute",
    "sample_windows",
]
