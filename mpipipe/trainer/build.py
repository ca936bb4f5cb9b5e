"""From layers to this rank's stages: who owns what, which weights are tied, and the list of all parameters that every
rank agrees on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from mpipipe.collectives import all_gather_objects
from mpipipe.config import Config
from mpipipe.device import Device
from mpipipe.errors import ConfigError, EngineError
from mpipipe.formats.checkpoint import BUFFERS, PARAMETERS
from mpipipe.partition import LayerDescription, Partition, describe_costs, make_partition
from mpipipe.stage import Gradient, LossFunction, Stage, StageLayer
from mpipipe.trainer.shared import SharedBuffers, known_modules, note, refuse_lazy, refuse_shared_weights
from mpipipe.trainer.tied import TiedGroup, check_groups, find_groups, share_values
from mpipipe.transport import Transport

Layer = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class LayerList:
    """The whole model as every rank knows it. Entries of ``layers`` are modules, or factories that run on their owner
    only.

    ``has_flops``: the descriptions count FLOPs; without any, every layer counts as one.
    """

    layers: Sequence[Layer]
    names: Sequence[str]
    descriptions: Sequence[LayerDescription]
    tied: Sequence[tuple[str, str]]
    has_flops: bool

    @classmethod
    def of(
        cls,
        layers: Sequence[Layer],
        names: Sequence[str] | None,
        descriptions: Sequence[LayerDescription] | None,
        tied: Sequence[tuple[str, str]],
    ) -> LayerList:
        if not hasattr(layers, "__len__"):
            raise ConfigError(f"layers is a {type(layers).__name__}", allowed="a list of modules, or of functions")
        given = list(names) if names is not None else [str(index) for index in range(len(layers))]
        has_flops = descriptions is not None
        if descriptions is None:
            descriptions = describe_costs([1.0] * len(layers), given)
        if not len(layers) == len(given) == len(descriptions):
            raise ConfigError(
                f"{len(layers)} layers, {len(given)} names and {len(descriptions)} descriptions do not belong together"
            )
        for name, layer in zip(given, layers, strict=True):
            if not callable(layer):  # a module is
                raise ConfigError(
                    f"layer {name} is a {type(layer).__name__} ({str(layer)[:60]!r})",
                    allowed="a torch module, or a function without arguments that makes one",
                )
            if isinstance(layer, nn.Module):
                refuse_lazy(name, layer, alike=True)
        twice = [name for name, times in Counter(given).items() if times > 1]
        if twice:
            raise ConfigError(
                f"several layers are named {', '.join(map(repr, twice[:3]))}: every layer has a name of its own, by "
                "which its parameters are known"
            )
        return cls(layers, given, descriptions, tied, has_flops)


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """One trainable parameter of the whole model, tied ones once under their primary's name. ``owner``: rank that
    counts and saves it.
    """

    name: str
    shape: tuple[int, ...]
    owner: int


@dataclass
class RankModel:
    """What one rank holds.

    ``parameters``: trainable leaves by global name, one for each weight (a tied weight under its primary's name).
    ``gradients``: their totals. ``fixed``: frozen parameters and buffers, by their path in a checkpoint.
    ``everything``: all trainable parameters of the model in layer order, alike on every rank. ``first_trained``: the
    first stage that has one.
    """

    partition: Partition
    placement: tuple[int, ...]
    stages: dict[int, Stage]
    parameters: dict[str, torch.Tensor]
    gradients: dict[str, Gradient]
    fixed: dict[str, torch.Tensor]
    tied: list[TiedGroup]
    everything: list[ParameterInfo]
    first_trained: int = 0
    shared_buffers: SharedBuffers = field(default_factory=lambda: SharedBuffers({}, set()))

    def check_trained(self) -> None:
        """Raise ``EngineError`` for a parameter that was frozen after the trainer was made."""
        for name, parameter in self.parameters.items():
            if not parameter.requires_grad:
                raise EngineError(
                    f"parameter {name} was frozen after the trainer was made: take requires_grad_(False) before, and "
                    "for a later phase make another trainer, which goes on from the checkpoint"
                )

    @property
    def modules(self) -> list[nn.Module]:
        return [layer.module for stage in self.stages.values() for layer in stage.layers]

    @property
    def all_gradients(self) -> list[Gradient]:
        """Every running total of the rank, those of a tied weight's parts apart."""
        return [gradient for stage in self.stages.values() for layer in stage.layers for gradient in layer.gradients]


def _make(layer: Layer, index: int, name: str, seed: int, device: Device) -> nn.Module:
    """The module on the device, with contiguous parameters: the optimizer's kernel takes memory as it lies."""
    if isinstance(layer, nn.Module):
        module = layer
    else:
        before = torch.get_rng_state()
        try:
            torch.manual_seed((seed * 1_000_003 + index) % (1 << 63))
            module = layer()
        except (Exception, SystemExit) as error:
            note(error, f"while layer {index} was built")
            raise
        finally:
            torch.set_rng_state(before)
        if not isinstance(module, nn.Module):
            error = ConfigError(
                f"the function for layer {index} returned a {type(module).__name__}", allowed="a torch module"
            )
            error.seen_alike = False  # it runs on the layer's owner only
            raise error
        refuse_lazy(name, module, alike=False)
    module = module.to(device.torch_device)
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()
    return module


def build_rank_model(
    config: Config,
    model: LayerList,
    loss_fn: LossFunction,
    placement: tuple[int, ...],
    transport: Transport,
    device: Device,
) -> RankModel:
    """Build this rank's stages. Collective: ends when all ranks agree on the list of parameters."""
    stages_count = len(placement)
    partition = make_partition(model.descriptions, stages_count, config.pipeline.partition, ranks=transport.size)
    stage_of = {layer: stage for stage in range(stages_count) for layer in partition.layers_of(stage)}
    owner_of = {model.names[layer]: placement[stage] for layer, stage in stage_of.items()}
    mine = [stage for stage in range(stages_count) if placement[stage] == transport.rank]
    modules = {
        index: _make(model.layers[index], index, model.names[index], config.run.seed, device)
        for stage in mine
        for index in partition.layers_of(stage)
    }
    groups = find_groups(model.layers, model.names, model.tied, owner_of)
    local = {model.names[index]: module for index, module in modules.items()}
    known = known_modules(model.layers, model.names, local)
    given = {name for name, layer in zip(model.names, model.layers, strict=True) if isinstance(layer, nn.Module)}
    refuse_shared_weights(known, given, groups)
    shared_buffers = SharedBuffers(known, given)
    check_groups(groups, local, transport)
    for group in groups:
        group.localize(local)
        share_values(group, transport, device)
    stages = {}
    for stage in mine:
        layers = [StageLayer(modules[index], index, model.names[index]) for index in partition.layers_of(stage)]
        stages[stage] = Stage(stage, layers, device, loss_fn if stage == stages_count - 1 else None)
    rank_model = RankModel(partition, placement, stages, {}, {}, {}, groups, [], shared_buffers=shared_buffers)
    _register(rank_model, transport)
    return rank_model


def _register(model: RankModel, transport: Transport) -> None:
    canonical = {name: group.names[0] for group in model.tied for name in group.names}
    leading = {group.first_local for group in model.tied}
    owned: list[tuple[int, str, list[int], str]] = []
    for stage in model.stages.values():
        for layer in stage.layers:
            trainable = set(layer.names)
            for name, parameter, gradient in zip(layer.names, layer.parameters, layer.gradients, strict=True):
                known = canonical.get(name, name)
                if known == name:
                    owned.append((layer.index, name, list(parameter.shape), str(parameter.dtype)))
                if name in leading or name not in canonical:
                    model.parameters[known] = parameter
                    model.gradients[known] = gradient
            for key, value in layer.module.state_dict(keep_vars=True).items():
                name = f"{layer.name}.{key}"
                if name not in trainable and (name in leading or name not in canonical):
                    kind = PARAMETERS if isinstance(value, nn.Parameter) else BUFFERS
                    model.fixed[kind + canonical.get(name, name)] = value.detach()
    for group in model.tied:
        group.attach(
            {
                name: g
                for s in model.stages.values()
                for x in s.layers
                for name, g in zip(x.names, x.gradients, strict=True)
            }
        )
    gathered = all_gather_objects(transport, owned)
    found = [
        (layer, order, name, shape, dtype, rank)
        for rank, rows in enumerate(gathered)
        for order, (layer, name, shape, dtype) in enumerate(rows)
    ]
    found.sort(key=lambda row: row[:2])
    _check_trainable([(name, dtype) for _, _, name, _, dtype, _ in found])
    _settle_first(model, found[0][0])
    model.everything = [ParameterInfo(name, tuple(shape), rank) for _, _, name, shape, _, rank in found]


def _settle_first(model: RankModel, layer: int) -> None:
    """Tell the stages the first layer with a trainable parameter: what lies before it needs no backward."""
    stages = range(model.partition.num_stages)
    model.first_trained = next(stage for stage in stages if layer in model.partition.layers_of(stage))
    for stage in model.stages.values():
        stage.first_trained = layer


def _check_trainable(parameters: Sequence[tuple[str, str]]) -> None:
    """Refuse, alike on every rank, a model with nothing to train and trainable weights that are not float32."""
    if not parameters:
        raise ConfigError("no layer has a trainable parameter: there is nothing to train")
    for name, dtype in parameters:
        if dtype != str(torch.float32):
            raise ConfigError(
                f"parameter {name} is {dtype}; trainable parameters are torch.float32",
                key="precision.compute",
                allowed="float32",
            )
