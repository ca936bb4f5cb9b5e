"""Headers: what they say of an activation, and which activations an agreed form takes."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from mpipipe.engine.forms import HEADER_BYTES, Form, FormBook, Part, header_bytes, mismatch, text_of
from mpipipe.errors import MessageMismatchError
from mpipipe.stage import Activation
from mpipipe.stage.nested import flatten


class Pair(NamedTuple):
    one: Any
    two: Any


def activation(value: object, needs: tuple[bool, ...] | None = None) -> Activation:
    tensors, spec = flatten(value)
    if needs is None:
        needs = tuple(tensor.is_floating_point() for tensor in tensors)
    return Activation(tensors, needs, spec)


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
]  # fmt: skip

VALUES: dict[str, object] = {
    "tensor": torch.ones(2, 3),
    "types": [torch.ones(2, k, dtype=dtype) for k, dtype in enumerate(DTYPES)],
    "sizes": (torch.ones(()), torch.ones(0), torch.ones(3, 0, 2), torch.ones(1, 1, 1)),
    "nested": {
        "a": Pair([torch.ones(2)], {"b": (torch.ones(1, dtype=torch.int64),)}),
        3: None,
        "c": ["x", 1.5, -0.0, 2j, b"y"],
    },
}


@pytest.mark.parametrize("name", VALUES)
def test_a_header_says_all_of_a_form(name: str) -> None:
    given = activation(VALUES[name])
    form = Form.of(given)
    packed = form.pack("0SEND_F0")
    assert header_bytes(packed[:HEADER_BYTES]) == len(packed)
    padded = packed + bytes(HEADER_BYTES)
    found = Form.unpack(padded)
    assert found == form
    assert found.fits(given)
    assert [part.nbytes for part in found.parts] == [tensor.nbytes for tensor in given.tensors]
    assert [part for part, needed in zip(found.parts, found.needs, strict=True) if needed] == list(found.gradient)


def test_a_long_header_says_its_length_in_its_first_message() -> None:
    packed = Form.of(activation({f"tensor number {k}": torch.ones(k) for k in range(60)})).pack("0SEND_F0")
    assert len(packed) > HEADER_BYTES
    assert header_bytes(packed[:HEADER_BYTES]) == len(packed)


H, N = torch.ones(2, 3), torch.ones(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"h": H.T, "n": N}, "tensor 0 of shape (3, 2) torch.float32, and had (2, 3) torch.float32"),
        ({"h": H, "n": N.int()}, "tensor 1 of shape (2,) torch.int32, and had (2,) torch.int64"),
        ({"n": N, "h": H}, "tensor 0 of shape (2,) torch.int64, and had (2, 3) torch.float32"),
        ({"h": H, "k": N}, "the structure {'h': tensor, 'k': tensor}, and had {'h': tensor, 'n': tensor}"),
        ({"h": H}, "the structure {'h': tensor}, and had {'h': tensor, 'n': tensor}"),
        ((H, N), "the structure (tensor, tensor), and had {'h': tensor, 'n': tensor}"),
        (Pair(H, [N]), "the structure Pair(tensor, [tensor]), and had {'h': tensor, 'n': tensor}"),
        ({"h": H, "n": N, "m": 3}, "the structure {'h': tensor, 'n': tensor, 'm': 3}, and had"),
    ],
)
def test_another_value_does_not_fit_and_the_error_says_where(other: object, words: str) -> None:
    form = Form.of(activation({"h": H, "n": N}))
    given = activation(other)
    assert not form.fits(given)
    text = str(mismatch("1SEND_F3", Form.of(given), form))
    assert text.startswith(f"1SEND_F3 has {words}")
    assert "may depend on its input's shape only" in text


def test_fewer_gradients_fit_and_more_do_not() -> None:
    value = (H, H, N)
    both = Form.of(activation(value, (True, True, False)))
    one = Form.of(activation(value, (True, False, False)))
    assert both.fits(activation(value, (False, True, False)))
    assert both.fits(activation(value, (False, False, False)))
    assert not one.fits(activation(value, (True, True, False)))
    assert not one.fits(activation(value, (False, True, False)))
    text = str(mismatch("0SEND_F1", both, one))
    assert "0SEND_F1 has an output that takes a gradient, and had one that does not for a microbatch of" in text


def test_a_shape_that_differs_in_a_single_tensor_names_no_number() -> None:
    before, now = (Form.of(activation(torch.ones(2, k))) for k in (3, 4))
    assert now.differs_from(before) == "shape (2, 4) torch.float32, and had (2, 3) torch.float32"


def test_a_class_that_is_found_nowhere_can_not_be_sent() -> None:
    class Local(NamedTuple):
        x: torch.Tensor

    for value in (Local(H), {"deep": [Local(H)]}):
        with pytest.raises(MessageMismatchError, match=r"2SEND_F5 holds what can't go to another rank .*Local"):
            Form.of(activation(value)).pack("2SEND_F5")


def test_structures_in_words() -> None:
    value = {"a": Pair([H], (N, None)), 3: ("x", 1.5, {})}
    assert text_of(flatten(value)[1]) == "{'a': Pair([tensor], (tensor, None)), 3: ('x', 1.5, {})}"
    assert str(Part.of(H)) == "(2, 3) torch.float32"


def test_a_form_is_agreed_when_the_run_after_begins() -> None:
    book, form = FormBook(), Form.of(activation(H))
    book.begin_run()
    book.learn(1, 0, form)
    assert book.find(1, 0) is form
    assert book.find(0, 0) is None
    assert not book.agreed
    book.begin_run()
    assert book.agreed == {(1, 0): form}
    book.learn(1, 1, form)
    assert list(book.agreed) == [(1, 0)]
    book.begin_run()
    assert list(book.agreed) == [(1, 0), (1, 1)]
