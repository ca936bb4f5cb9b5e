"""Token data: deterministic sampling of windows, batches from token files, and token files from text."""

from mpipipe.data.build import BuiltTokens, build_byte_tokens, byte_entropies
from mpipipe.data.sampling import permute, sample_windows
from mpipipe.data.source import Batch, TokenSource, expand_paths

__all__ = [
    "Batch",
    "BuiltTokens",
    "TokenSource",
    "build_byte_tokens",
    "byte_entropies",
    "expand_paths",
    "permute",
    "sample_windows",
]
