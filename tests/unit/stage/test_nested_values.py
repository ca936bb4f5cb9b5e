"""Values of many tensors taken apart and put together, handed to a layer, and lent."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipipe.errors import DataError, EngineError
from mpipipe.stage import Activation, map_tensors, tensors_of
from mpipipe.stage.lent import Lent
from mpipipe.stage.nested import TENSOR, flatten, rebuild, versions


class Pair(NamedTuple):
    one: Any
    two: Any


PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary())
KEYS = st.one_of(st.text(), st.integers())


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(KEYS, inner, max_size=3),
            st.builds(Pair, inner, inner),
        ),
        max_leaves=12,
    )


def same(one: Any, other: Any) -> bool:
    """Equal in types, keys and their order, values, and the very tensors."""
    if isinstance(one, torch.Tensor):
        return one is other
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


@given(nested(st.one_of(PLAIN, st.builds(lambda: torch.ones(1)))))
@settings(max_examples=200, deadline=None)
def test_taken_apart_and_put_together_it_is_the_same(value: Any) -> None:
    found = tensors_of(value)
    if not found:
        with pytest.raises(EngineError, match="without any tensor"):
            flatten(value)
        return
    tensors, spec = flatten(value)
    assert list(map(id, tensors)) == list(map(id, found))
    assert hash(spec) == hash(flatten(value)[1])
    assert flatten(value)[1] == spec
    assert same(rebuild(spec, tensors), value)
    assert same(map_tensors(value, lambda tensor: tensor), value)


@given(nested(st.one_of(PLAIN, st.just("T"))), nested(st.one_of(PLAIN, st.just("T"))))
@settings(max_examples=200, deadline=None)
def test_two_values_have_one_spec_only_if_they_differ_in_tensors_alone(one: Any, other: Any) -> None:
    tensor = torch.ones(1)
    specs = [flatten([value, tensor])[1] for value in (one, other)]
    assert (specs[0] == specs[1]) == same(one, other)


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), (1, 1.0), (0.0, -0.0), ((), []), ("a", b"a"), ({}, None), (0, None)]
)
def test_values_that_python_takes_as_equal_are_not(one: object, other: object) -> None:
    assert flatten((torch.ones(1), one))[1] != flatten((torch.ones(1), other))[1]


@pytest.mark.parametrize("made", [lambda: float("nan"), lambda: complex("nan+2j"), lambda: [None, float("nan")]])
def test_nan_is_nan_here_and_after_a_journey(made: Callable[[], object]) -> None:
    """Two are equal to nothing, not to themselves: every microbatch had another structure, and was refused."""
    tensor = torch.ones(1)
    specs = [flatten([made(), tensor])[1] for _ in range(2)]
    assert specs[0] == specs[1] == pickle.loads(pickle.dumps(specs[0]))
    assert hash(specs[0]) == hash(specs[1])
    assert repr(rebuild(specs[0], [tensor])) == repr([made(), tensor])
    assert specs[0] != flatten([1.0, tensor])[1]


def test_mappings_become_dicts_and_the_order_of_keys_counts() -> None:
    tensors, spec = flatten(OrderedDict(b=torch.ones(1), a=torch.zeros(1)))
    assert type(rebuild(spec, tensors)) is dict
    assert list(rebuild(spec, tensors)) == ["b", "a"]  # type: ignore[call-overload]
    assert flatten(OrderedDict(a=torch.ones(1), b=torch.zeros(1)))[1] != spec
    assert flatten(torch.ones(2))[1] == TENSOR
    assert flatten((torch.ones(2),))[1] != TENSOR


def test_one_tensor_twice_keeps_two_places() -> None:
    tensor = torch.ones(2)
    tensors, spec = flatten([tensor, (tensor, tensor)])
    assert len(tensors) == 3
    with pytest.raises(StopIteration):
        rebuild(spec, tensors[:2])


@pytest.mark.parametrize("value", [{1}, object(), slice(1), range(3), torch.float32, lambda: 1])
def test_what_neither_a_batch_nor_a_layer_may_hold(value: object) -> None:
    with pytest.raises(DataError, match=r"a batch holds a \S+; it may hold torch tensors in tuples, lists"):
        map_tensors((torch.ones(1), {"a": [value]}), torch.clone)
    with pytest.raises(EngineError, match="returned a "):
        flatten((torch.ones(1), {"a": [value]}))


# --- an activation enters a layer ---


def test_a_layer_gets_tensors_of_its_own_in_the_same_memory() -> None:
    h, mask, scale = torch.ones(2, 3), torch.ones(2, dtype=torch.bool), torch.ones(())
    tensors, spec = flatten({"h": h, "side": [mask, scale]})
    activation = Activation(tensors, (True, False, False), spec)
    value, leaves = activation.enter(True)
    assert [leaf.requires_grad for leaf in leaves] == [True]
    assert value["h"] is leaves[0]  # type: ignore[index]
    assert value["h"].data_ptr() == h.data_ptr()  # type: ignore[index]
    assert not h.requires_grad
    assert not any(one.requires_grad for one in value["side"])  # type: ignore[index]
    assert activation.enter(False)[1] == []
    assert Activation((h,), (True,)).enter(False)[1] == []
    assert Activation((mask,), (False,)).enter(True)[1] == []


def test_every_change_in_place_shows_in_the_versions() -> None:
    tensors = [torch.ones(2, 3), torch.ones(2)]
    value, _ = Activation(tensors, (True, False), flatten(tensors)[1]).enter(True)
    for change in (
        lambda: value[1].add_(1),  # type: ignore[index]
        lambda: value[1][0].zero_(),  # type: ignore[index]
        lambda: value[1].view(2, 1).detach().copy_(torch.ones(2, 1)),  # type: ignore[index]
        lambda: torch.add(torch.ones(2), 1, out=value[1]),  # type: ignore[index]
    ):
        before = versions(tensors)
        change()
        assert versions(tensors) != before
    with torch.no_grad():
        before = versions(tensors)
        value[0].t().mul_(2)  # type: ignore[index]
        assert versions(tensors) != before


# --- the batch is lent ---


def test_who_changed_nothing_the_first_time_gets_the_batch_itself() -> None:
    lent, value = Lent(), {"x": torch.ones(3), "n": 3}
    first = lent.out(value)
    assert first["x"] is not value["x"]  # type: ignore[index]
    assert lent.back()
    again = lent.out(value)
    assert again is not value
    assert again["x"] is value["x"]  # type: ignore[index]
    again["x"] = torch.ones(2).add_(1)  # type: ignore[index]
    again["more"] = torch.ones(3)  # type: ignore[index]
    assert lent.back()
    assert list(value) == ["x", "n"]
    lent.out(value)["x"].add_(1)  # type: ignore[index]
    assert not lent.back()


def test_who_changes_it_gets_copies_for_ever() -> None:
    lent, value = Lent(), [torch.ones(3), torch.zeros(2)]
    for _ in range(3):
        lent.out(value)[1].add_(1)  # type: ignore[index]
        assert lent.back()
    lent.out(value)
    assert lent.back()
    assert [one.tolist() for one in value] == [[1.0] * 3, [0.0] * 2]
    single = Lent()
    single.out(value[0]).zero_()  # type: ignore[attr-defined]
    assert single.back()
    assert single.out(value[0]) is not value[0]
