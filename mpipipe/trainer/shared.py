"""What two layers share without saying so: weights, and buffers that change. On another number of ranks each would have
its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import torch
from torch import nn

from mpipipe.errors import ConfigError
from mpipipe.trainer.tied import TiedGroup


def refuse_lazy(name: str, module: nn.Module, *, alike: bool) -> None:
    """Raise ``ConfigError`` for a module whose shapes are not known yet. ``alike``: every rank sees it."""
    held = [*module.named_parameters(), *module.named_buffers()]
    lazy = next((key for key, value in held if nn.parameter.is_lazy(value)), None)
    if lazy is not None:
        raise _error(
            f"layer {name} has the parameter or buffer {lazy!r} without a shape, as of nn.LazyLinear: take nn.Linear, "
            "or run the layer once before",
            alike,
        )


def known_modules(
    layers: Sequence[object], names: Sequence[str], local: Mapping[str, nn.Module]
) -> dict[str, nn.Module]:
    """The layers that this rank can see, in their order: those given as modules, and its own."""
    given = {name: layer for name, layer in zip(names, layers, strict=True) if isinstance(layer, nn.Module)}
    return {name: given[name] if name in given else local[name] for name in names if name in given or name in local}


def refuse_shared_weights(modules: Mapping[str, nn.Module], given: set[str], groups: Sequence[TiedGroup]) -> None:
    """Raise ``ConfigError`` where two layers have a trainable parameter in the same memory and are not tied.

    ``modules``: as of ``known_modules``; ``given``: names of those that came as modules, which every rank sees.
    """
    tied = {name: group for group in groups for name in group.names}
    first: dict[int, tuple[str, str]] = {}
    found: list[tuple[str, str]] = []
    alike = True
    for layer, module in modules.items():
        for key, parameter in module.named_parameters():
            name = f"{layer}.{key}"
            if not parameter.requires_grad or not parameter.data_ptr():
                continue
            before, other = first.setdefault(parameter.data_ptr(), (layer, name))
            if before != layer and (name not in tied or tied[name] is not tied.get(other)):
                found.append((other, name))
                alike = alike and {before, layer} <= given
    if found:
        pairs = ", ".join(map(str, found))
        raise _error(
            f"parameters {found[0][0]} and {found[0][1]} are one in memory, and nothing says that they are tied: on "
            f"another number of ranks they would be two. Give tied=[{pairs}] to the trainer, or let each layer make "
            "its own",
            alike,
        )


class SharedBuffers:
    """Buffers of modules that two layers share. Constants may be; what changes would change for both layers on one rank
    and for each alone on two.
    """

    def __init__(self, modules: Mapping[str, nn.Module], given: set[str]) -> None:
        """Raises ``ConfigError`` for a shared module that keeps running statistics."""
        self._watched: list[tuple[str, str, nn.Module, str]] = []
        self._before: list[tuple[torch.Tensor | None, int]] = []
        first: dict[int, str] = {}
        for layer, name, part in _parts(modules):
            before = first.setdefault(id(part), layer)
            buffers = {key: value for key, value in part._buffers.items() if value is not None}
            for key, value in buffers.items():
                owner = first.setdefault(id(value), layer)
                if before != layer or owner != layer:
                    self._watched.append((owner if before == layer else before, layer, part, key))
            if before != layer and buffers and part.training and getattr(part, "track_running_stats", False):
                raise _error(
                    f"layers {before} and {layer} share {name} ({type(part).__name__}), which keeps running "
                    "statistics: on another number of ranks each would have its own. Let each layer make one",
                    {before, layer} <= given,
                )

    def begin(self) -> None:
        """Before a run."""
        self._before = self._now()

    def refuse_changed(self) -> None:
        """Raise ``ConfigError`` when the run changed one."""
        for (before, layer, part, key), (old, version), (now, other) in zip(
            self._watched, self._before, self._now(), strict=True
        ):
            if now is not old or version != other:
                raise _error(
                    f"layers {before} and {layer} share the buffer {key!r} ({type(part).__name__}), and one of them "
                    "changed it: on another number of ranks each would have its own. Let each layer make one",
                    False,
                )

    def _now(self) -> list[tuple[torch.Tensor | None, int]]:
        held = [part._buffers.get(key) for _, _, part, key in self._watched]
        return [(one, -1 if one is None else one._version) for one in held]


def _parts(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str, nn.Module]]:
    for layer, module in modules.items():
        for path, part in module.named_modules():
            yield layer, f"{layer}.{path}" if path else layer, part


def _error(text: str, alike: bool) -> ConfigError:
    error = ConfigError(text)
    error.seen_alike = alike
    return error


def note(error: BaseException, text: str) -> None:
    """Tell more in an error of the user's, which keeps its type also if it takes no note, as of a frozen dataclass."""
    with suppress(Exception):
        error.add_note(f"mpipipe: {text}")
