"""Values that are more than one tensor: tuples, lists and dicts of tensors, taken apart at a layer's border and put
together again behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from mpipipe.errors import DataError, EngineError

Nested = object
"""A tensor, or tuples (also named ones), lists and mappings of tensors; numbers, texts and None as they are."""

Spec = tuple[Hashable, ...]
"""What a nested value is without its tensors: ``TENSOR``, or (kind, ..., members). Picklable where the classes of named
tuples are.
"""

TENSOR: Spec = ()
"""The place of one tensor; of a value that is nothing else too."""

_PLAIN = (bool, int, float, complex, str, bytes)


class Constant:
    """A number, a text or None beside tensors. Equal is what reads alike: 0.0 is not -0.0, 1 not True; nan is nan."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant) or type(self.value) is not type(other.value):
            return False
        return self.value is other.value or repr(self.value) == repr(other.value)

    def __hash__(self) -> int:
        return hash(repr(self.value))


def map_tensors(value: Nested, change: Callable[[torch.Tensor], object]) -> Nested:
    """The same structure with every tensor replaced by ``change(tensor)``; a mapping becomes a dict. Raises
    ``DataError`` for anything else that a batch can't hold: it would not be cut.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        members = [map_tensors(member, change) for member in value]
        kind: Any = type(value)
        return kind(*members) if hasattr(value, "_fields") else tuple(members) if isinstance(value, tuple) else members
    if isinstance(value, Mapping):
        return {key: map_tensors(member, change) for key, member in value.items()}
    if value is None or isinstance(value, _PLAIN):
        return value
    raise DataError(
        f"a batch holds a {type(value).__module__}.{type(value).__name__}; it may hold torch tensors in tuples, lists "
        "and mappings, and numbers, texts and None"
    )


def tensors_of(value: Nested) -> list[torch.Tensor]:
    """Every tensor of a value that ``map_tensors`` takes, in its order."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    map_tensors(value, found.append)
    return found


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """What changes with every change of a tensor in place, also through views and detached ones."""
    return [tensor._version for tensor in tensors]


def flatten(value: Nested) -> tuple[list[torch.Tensor], Spec]:
    """The tensors of what a layer returned, in order, and the rest of it.

    Raises ``EngineError`` for what can't go from layer to layer.
    """
    tensors: list[torch.Tensor] = []
    spec = _take_apart(value, tensors)
    if not tensors:
        raise EngineError(
            f"returned {_kind(value)} without any tensor; a layer of a pipeline returns a tensor, or tuples, lists and "
            "dicts of tensors"
        )
    return tensors, spec


def _take_apart(value: Nested, tensors: list[torch.Tensor]) -> Spec:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise EngineError(f"returned a tensor of layout {value.layout}; only dense ones go from layer to layer")
        tensors.append(value)
        return TENSOR
    if isinstance(value, tuple | list):
        members = tuple(_take_apart(member, tensors) for member in value)
        kind = type(value) if hasattr(value, "_fields") else "tuple" if isinstance(value, tuple) else "list"
        return (kind, members)
    if isinstance(value, Mapping):
        return ("dict", tuple(value), tuple(_take_apart(member, tensors) for member in value.values()))
    if value is None or isinstance(value, _PLAIN):
        return ("value", Constant(value))
    raise EngineError(
        f"returned {_kind(value)}; a layer of a pipeline returns a tensor, or tuples, lists and dicts of tensors, "
        "numbers, texts and None"
    )


def rebuild(spec: Spec, tensors: Sequence[torch.Tensor]) -> Nested:
    """What ``flatten`` took apart, with other tensors in the places."""
    return tensors[0] if not spec else _put_together(spec, iter(tensors))


def _put_together(spec: Any, tensors: Any) -> Nested:
    if not spec:
        return next(tensors)
    kind = spec[0]
    if kind == "value":
        return spec[1].value
    if kind == "dict":
        return {key: _put_together(member, tensors) for key, member in zip(spec[1], spec[2], strict=True)}
    members = [_put_together(member, tensors) for member in spec[1]]
    return members if kind == "list" else tuple(members) if kind == "tuple" else kind(*members)


def _kind(value: object) -> str:
    return f"a {type(value).__module__}.{type(value).__name__}".replace("builtins.", "")
