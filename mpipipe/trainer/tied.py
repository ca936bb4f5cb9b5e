"""Weights that several layers share: one value, one update, their gradients added once.

Every layer has a leaf of its own, so the parts of the gradient add up apart over the microbatches, on one rank as on
many. At the end of a step the owners exchange their parts and each adds them in layer order: the copies stay equal bit
for bit.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from mpipipe.collectives import all_gather_objects
from mpipipe.device import Buffer, Device
from mpipipe.errors import ConfigError
from mpipipe.stage import Gradient
from mpipipe.transport import COLLECTIVE_TAG, Request, Transport


class TiedGroup:
    """One shared weight: the global names of its parts in layer order (the first is the primary), and the rank of
    each.
    """

    def __init__(self, names: Sequence[str], ranks: Sequence[int]) -> None:
        self.names = tuple(names)
        self.ranks = tuple(ranks)
        self._leaves: dict[str, torch.Tensor] = {}
        self._gradients: dict[str, Gradient] = {}

    @property
    def owners(self) -> list[int]:
        """Ranks that hold a part, ascending."""
        return sorted(set(self.ranks))

    @property
    def first_local(self) -> str | None:
        """The first of this rank's parts, which takes the sum and the update; None without any."""
        return next(iter(self._leaves), None)

    def localize(self, modules: Mapping[str, nn.Module]) -> None:
        """Give each local part a leaf of its own; those of one rank share their memory, the first local part's."""
        places = {name: found for name in self.names if (found := _locate(modules, name)) is not None}
        first: nn.Parameter | None = None
        for name, (layer, parent, key) in places.items():
            parameter = parent.get_parameter(key)
            if first is None:
                first = parameter
            elif parameter is first or parameter.data_ptr() != first.data_ptr():
                leaf = nn.Parameter(first.detach(), requires_grad=first.requires_grad)
                _take_over(leaf, parameter)
                others = [(there, word) for other, (_, there, word) in places.items() if other != name]
                _replace(layer, parameter, leaf, others)
                parameter = leaf
            self._leaves[name] = parameter

    def attach(self, gradients: Mapping[str, Gradient]) -> None:
        """Remember the local parts' totals."""
        self._gradients = {name: gradients[name] for name in self._leaves if name in gradients}

    @property
    def value(self) -> torch.Tensor | None:
        """The shared memory on this rank."""
        return next(iter(self._leaves.values())).detach() if self._leaves else None

    def add_up(self, transport: Transport, device: Device) -> None:
        """Collective among the owners: the first local part's total becomes the sum of all parts, in layer order."""
        if not self._gradients:
            return
        parts = {name: gradient.finish() for name, gradient in self._gradients.items()}
        sends = []
        for name, part in parts.items():
            for peer in self.owners:
                if peer != transport.rank:
                    sends.append((_send(transport, device, part, peer), peer, name))
        example = next(iter(parts.values()))
        total: torch.Tensor | None = None
        for name, rank in zip(self.names, self.ranks, strict=True):
            here = parts.get(name)
            source = _fetched(transport, device, example, rank, name) if here is None else nullcontext(here)
            with source as part:
                total = part.clone() if total is None else total.add_(part)
        for (request, buffer), peer, name in sends:
            transport.wait(request, f"rank {peer} to take the gradient of {name}")
            device.sent(buffer)
        assert total is not None
        example.copy_(total)


def _locate(modules: Mapping[str, nn.Module], name: str) -> tuple[nn.Module, nn.Module, str] | None:
    """The layer of a parameter, the module that holds it, and its key there; None if it is not on this rank."""
    for layer, module in modules.items():
        if name.startswith(layer + "."):
            path, _, key = name[len(layer) + 1 :].rpartition(".")
            try:
                parent = module.get_submodule(path)
                parent.get_parameter(key)
            except AttributeError:
                continue
            return module, parent, key
    return None


def _take_over(leaf: nn.Parameter, parameter: nn.Parameter) -> None:
    """Hooks and attributes of a parameter go on in its place, as on a rank of its own."""
    hooks = parameter._backward_hooks
    if hooks:
        leaf._backward_hooks = hooks  # the same dict: a handle removes from both
    late = getattr(parameter, "_post_accumulate_grad_hooks", None)
    if late:
        leaf._post_accumulate_grad_hooks = late
    vars(leaf).update(vars(parameter))


def _replace(layer: nn.Module, old: nn.Parameter, new: nn.Parameter, kept: Sequence[tuple[nn.Module, str]]) -> None:
    """Put ``new`` wherever a layer uses ``old``, but for the places ``kept``."""
    for module in layer.modules():
        for key, parameter in module._parameters.items():
            if parameter is old and not any(there is module and word == key for there, word in kept):
                module.register_parameter(key, new)


def _send(transport: Transport, device: Device, tensor: torch.Tensor, peer: int) -> tuple[Request, Buffer]:
    """Begin to send a tensor; the buffer goes back to the device once the request is complete."""
    buffer = device.outgoing(tensor)
    device.finish()
    return transport.isend(buffer.message, peer, COLLECTIVE_TAG), buffer


@contextmanager
def _fetched(
    transport: Transport, device: Device, like: torch.Tensor, rank: int, name: str
) -> Iterator[torch.Tensor]:
    """A tensor of the shape and type of ``like`` that another rank sends. Its memory is the device's own again after.
    """
    buffer = device.allocate(like.numel() * like.element_size())
    device.finish()  # whatever read this memory before
    device.receiving(buffer)
    transport.wait(transport.irecv(buffer.message, rank, COLLECTIVE_TAG), f"the tied weight {name} of rank {rank}")
    device.landed(buffer)
    yield device.tensor(buffer, tuple(like.shape), like.dtype)
    device.release(buffer)
    device.forget(buffer)


def check_groups(groups: Sequence[TiedGroup], modules: Mapping[str, nn.Module], transport: Transport) -> None:
    """Collective. Raise the same ConfigError on every rank for a name that no layer has, and for parts of one weight
    that differ in shape or in being trained.
    """
    if not groups:
        return
    mine: dict[str, list[object]] = {}
    for name in (name for group in groups for name in group.names):
        found = _locate(modules, name)
        if found is not None:
            parameter = found[1].get_parameter(found[2])
            mine[name] = [list(parameter.shape), parameter.requires_grad]
    known = {name: facts for part in all_gather_objects(transport, mine) for name, facts in part.items()}
    for group in groups:
        for name in group.names:
            if name not in known:
                raise ConfigError(
                    f"tied: no layer has a parameter {name!r}", nearest=_nearest(name, modules, transport)
                )
            if known[name] != known[group.names[0]]:
                one, other = (
                    f"{part} ({tuple(known[part][0])}, {'trained' if known[part][1] else 'frozen'})"
                    for part in (group.names[0], name)
                )
                raise ConfigError(f"tied: {one} and {other} can't be one weight")


def _nearest(name: str, modules: Mapping[str, nn.Module], transport: Transport) -> str | None:
    """Collective. The parameter of any rank whose name is most like ``name``, or None."""
    mine = [f"{layer}.{key}" for layer, module in modules.items() for key, _ in module.named_parameters()]
    everyone = [known for part in all_gather_objects(transport, mine) for known in part]
    return next(iter(difflib.get_close_matches(name, everyone, n=1)), None)


def share_values(group: TiedGroup, transport: Transport, device: Device) -> None:
    """Collective among the owners: all copies take the primary's initial value."""
    value, primary = group.value, group.ranks[0]
    if value is None:
        return
    if transport.rank == primary:
        for peer in group.owners:
            if peer != primary:
                request, buffer = _send(transport, device, value, peer)
                transport.wait(request, f"rank {peer} to take the tied weight {group.names[0]}")
                device.sent(buffer)
    else:
        with _fetched(transport, device, value, primary, group.names[0]) as found:
            value.copy_(found)


def find_groups(
    layers: Sequence[object], names: Sequence[str], tied: Sequence[tuple[str, str]], owner_of: Mapping[str, int]
) -> list[TiedGroup]:
    """Groups from ``tied`` pairs of names, and from modules that share a ``Parameter`` (all ranks see the same layer
    list).
    """
    order: dict[str, int] = {name: index for index, name in enumerate(names)}
    links: dict[str, set[str]] = {}

    def join(one: str, other: str) -> None:
        merged = links.get(one, {one}) | links.get(other, {other})
        for member in merged:
            links[member] = merged

    def layer_of(name: str) -> str:
        inside = [layer for layer in names if name.startswith(layer + ".")]
        if not inside:
            raise ConfigError(
                f"tied: {name!r} is in no layer; parameters are named LAYER.PARAMETER with a layer of "
                f"{list(names)[:3]} ..."
            )
        return max(inside, key=len)

    for one, other in tied:
        join(one, other)
    seen: dict[int, str] = {}
    for layer, layer_name in zip(layers, names, strict=True):
        if isinstance(layer, nn.Module):
            for key, parameter in layer.named_parameters():
                first = seen.setdefault(id(parameter), f"{layer_name}.{key}")
                if first != f"{layer_name}.{key}":
                    join(first, f"{layer_name}.{key}")
    groups = {tuple(sorted(members, key=lambda name: (order[layer_of(name)], name))) for members in links.values()}
    return [TiedGroup(members, [owner_of[layer_of(name)] for name in members]) for members in sorted(groups)]
