"""mpipipe: pipeline-parallel training of transformers over MPI ranks.

Importing this package is cheap: neither mpi4py, torch nor cupy is imported here. ``mpipipe.Config`` is loaded on first
use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpipipe.config import Config as Config

__version__ = "0.1.0"
__all__ = ["Config", "__version__"]


def __getattr__(name: str) -> object:
    if name == "Config":
        from mpipipe.config import Config

        return Config
    raise AttributeError(f"module 'mpipipe' has no attribute {name!r}")
