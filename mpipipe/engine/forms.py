"""What an activation looks like: structure, shapes, types. Agreed between two stages once, by a header."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from math import prod

import torch

from mpipipe.errors import MessageMismatchError
from mpipipe.stage import Activation, Spec

HEADER_BYTES = 1024
"""Of a header's first message: 8 bytes with the length of the rest, then as much of it as fits."""

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Part:
    """Shape and dtype of one tensor, and its bytes."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Part:
        sizes = tuple(tensor.shape)
        return cls(sizes, tensor.dtype, prod(sizes) * tensor.dtype.itemsize)

    def __str__(self) -> str:
        return f"{self.sizes} {self.dtype}"


@dataclass(frozen=True, slots=True)
class Form:
    """The form of an activation. ``needs``: which parts take a gradient; ``gradient``: those parts, what the message of
    its gradient holds; ``nbytes``, ``gradient_nbytes``: of the two messages."""

    spec: Spec
    parts: tuple[Part, ...]
    needs: tuple[bool, ...]
    gradient: tuple[Part, ...]
    nbytes: int
    gradient_nbytes: int

    @classmethod
    def of(cls, activation: Activation) -> Form:
        parts = tuple(Part.of(tensor) for tensor in activation.tensors)
        return cls.made(activation.spec, parts, activation.needs)

    @classmethod
    def made(cls, spec: Spec, parts: tuple[Part, ...], needs: tuple[bool, ...]) -> Form:
        gradient = tuple(part for part, needed in zip(parts, needs, strict=True) if needed)
        sizes = (sum(part.nbytes for part in some) for some in (parts, gradient))
        return cls(spec, parts, needs, gradient, *sizes)

    def fits(self, activation: Activation) -> bool:
        """Whether an activation has this form, but that it may take fewer gradients."""
        if activation.needs != self.needs and not self._takes_fewer(activation):
            return False
        if activation.spec != self.spec:
            return False
        for part, tensor in zip(self.parts, activation.tensors, strict=True):
            if part.dtype != tensor.dtype or part.sizes != tensor.shape:
                return False
        return True

    def _takes_fewer(self, activation: Activation) -> bool:
        """A layer that detaches its output for some microbatches: their gradients are sent and not used."""
        return len(activation.needs) == len(self.needs) and all(
            agreed or not needed for agreed, needed in zip(self.needs, activation.needs, strict=True)
        )

    def pack(self, name: str) -> bytes:
        """The whole header. Raises ``MessageMismatchError`` when a named tuple's class can't be sent."""
        try:
            packed = pickle.dumps((self.spec, [(part.sizes, part.dtype) for part in self.parts], self.needs))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise MessageMismatchError(
                f"{name} holds what can't go to another rank ({error}): the class of a named tuple must be found by "
                "its name in a module, and a dict's keys be texts or numbers",
                message=name,
            ) from error
        return len(packed).to_bytes(_LENGTH_BYTES, "little") + packed

    @classmethod
    def unpack(cls, header: bytes) -> Form:
        spec, parts, needs = pickle.loads(header[_LENGTH_BYTES : header_bytes(header)])
        made = tuple(Part(sizes, dtype, prod(sizes) * dtype.itemsize) for sizes, dtype in parts)
        return cls.made(spec, made, needs)

    def differs_from(self, before: Form) -> str:
        """Where two forms differ, in words."""
        if len(self.parts) == len(before.parts) and self.parts != before.parts:
            for place, (new, old) in enumerate(zip(self.parts, before.parts, strict=True)):
                if new != old:
                    which = f"tensor {place} of " if len(self.parts) > 1 else ""
                    return f"{which}shape {new}, and had {old}"
        if self.spec != before.spec:
            return f"the structure {text_of(self.spec)}, and had {text_of(before.spec)}"
        return "an output that takes a gradient, and had one that does not"


def header_bytes(first: bytes) -> int:
    """Length of a whole header, from its first bytes."""
    return _LENGTH_BYTES + int.from_bytes(first[:_LENGTH_BYTES], "little")


def text_of(spec: Spec) -> str:
    """A structure in words, as ``(tensor, {'mask': tensor})``."""
    if not spec:
        return "tensor"
    kind, *members = spec
    if kind == "value":
        return repr(members[0].value)  # type: ignore[attr-defined]
    if kind == "dict":
        keys, values = members
        return "{" + ", ".join(f"{key!r}: {text_of(value)}" for key, value in zip(keys, values, strict=True)) + "}"  # type: ignore[call-overload]
    inside = ", ".join(text_of(member) for member in members[0])  # type: ignore[attr-defined]
    if kind == "list":
        return f"[{inside}]"
    return f"({inside})" if kind == "tuple" else f"{getattr(kind, '__name__', kind)}({inside})"


class FormBook:
    """The form of each stage's output for each signature of a microbatch, a number that all ranks give it alike.

    A signature that is new when a run begins has a header before each of its activations in that run; sender and
    receiver write down the same, so both know alike when a header is due. A gradient has the form of the activation
    that it belongs to, and never a header. ``agreed``: by (stage, signature), what was known before the run began.
    """

    def __init__(self) -> None:
        self.agreed: dict[tuple[int, int], Form] = {}
        self._new: dict[tuple[int, int], Form] = {}

    def begin_run(self) -> None:
        if self._new:
            self.agreed.update(self._new)
            self._new.clear()

    def find(self, stage: int, signature: int) -> Form | None:
        """The form, if anything is known by now."""
        key = (stage, signature)
        return self.agreed.get(key) or self._new.get(key)

    def learn(self, stage: int, signature: int, form: Form) -> None:
        self._new[(stage, signature)] = form


def mismatch(name: str, form: Form, before: Form) -> MessageMismatchError:
    """The error of a message whose form is not what it was ``before``."""
    return MessageMismatchError(
        f"{name} has {form.differs_from(before)} for a microbatch of the same input shapes before: what a layer "
        "returns may depend on its input's shape only; what changes otherwise can go as a tensor's contents",
        message=name,
    )
