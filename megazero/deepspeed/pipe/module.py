"""`PipelineStage`: a model as a sequence of layers, of which each rank builds those of its stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from megazero.deepspeed.pipe.files import LayerFiles
from megazero.deepspeed.pipe.grid import PipelineParallelGrid
from megazero.deepspeed.pipe.specs import Layer, TiedLayerSpec, name_of, trained_parameters
from megazero.deepspeed.pipe.stage import StageLayers, recompute, weight_of
from megazero.deepspeed.pipe.ties import TieGroup
from megazero.deepspeed.pipe.topology import PipeDataParallelTopology, ProcessTopology
from megazero.deepspeed.utils.split import split_layers
from megazero.deepspeed.zero.gathered import GatheredParameters
from megazero.deepspeed.zero.init import Init
from megazero.deepspeed.zero.partition import partition_of
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext
from megazero.mpu.launch import Launch
from megazero.mpu.torch_group import joined_world


class TiedWeights:
    """The tied weights of a stage, which other stages hold too."""

    tied_modules: nn.ModuleDict
    tied_weight_attrs: dict[str, list[str]]
    ties: dict[str, TieGroup]

    @property
    def tied_comms(self) -> dict[str, dict[str, object]]:
        """Key of tied weights -> their ranks, group, weights and module."""
        return {
            key: {
                "ranks": list(group.ranks),
                "group": group,
                "weight_attr": self.tied_weight_attrs[key],
                "module": self.tied_modules[key],
            }
            for key, group in sorted(self.ties.items())
        }

    @property
    def copied_buffers(self) -> set[str]:
        """The names of buffers that an earlier stage has too; that stage writes them to checkpoints."""
        return {
            f"tied_modules.{key}.{name}"
            for key, group in self.ties.items()
            if group.rank
            for name, _ in self.tied_modules[key].named_buffers()
        }

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, TieGroup]]:
        """Each tied weight that a `tied_weight_attr` names, with the group of its stages."""
        return [
            (weight_of(self.tied_modules[key], name, key), group)
            for key, group in sorted(self.ties.items())
            for name in self.tied_weight_attrs[key]
        ]

    def allreduce_tied_weight_gradients(self) -> None:
        """Sum the gradients of tied weights over their stages; an engine calls this by itself."""
        for key, group in sorted(self.ties.items()):
            for param in self.tied_modules[key].parameters():
                if param.grad is not None:
                    group.sum(param.grad)

    @torch.no_grad()
    def _copy_ties(self) -> None:
        for key, group in sorted(self.ties.items()):
            for tensor in (*self.tied_modules[key].parameters(), *self.tied_modules[key].buffers()):
                partition = partition_of(tensor) if isinstance(tensor, nn.Parameter) else None
                if partition is not None:
                    group.broadcast(partition.shard)
                    continue
                with GatheredParameters(tensor, modifier_rank=None):
                    value = tensor.detach().clone().contiguous()
                group.broadcast(value)
                self._write(tensor, value)

    def _write(self, tensor: Tensor, value: Tensor) -> None:
        holder = getattr(tensor, "shard_holder", None)
        if holder is None:
            tensor.copy_(value)
            return
        with holder.gathered([tensor], write_back=True):
            tensor.copy_(value)


class PipelineStage(TiedWeights, LayerFiles, StageLayers):
    """A model whose forward is ``for layer in layers: x = layer(x)``, split into stages.

    Names of parameters have the number of their layer in the whole model, as in ``3.weight``; those of tied
    weights are ``tied_modules.KEY.weight``.

    Args:
        layers: modules, specs, and functions.
        num_stages: the number of stages; the ranks of the world are divided over them.
        topology: the coordinates of all ranks, instead of `num_stages`; or a `ParallelContext`.
        loss_fn: computes the loss from the last layer's output and the labels; by default the output is the
            loss.
        seed_layers: seed each layer when it is built and each time it runs, so that neither depends on the
            number of stages.
        seed_fn: called with each seed; by default Python's, numpy's and torch's generators are seeded.
        base_seed: the first layer's seed.
        partition_method: see `split_layers`.
        activation_checkpoint_interval: the number of layers that are recomputed together; 0 recomputes none.
        activation_checkpoint_func: calls a function and recomputes it in backward; by default torch's
            `checkpoint`, not reentrant.
        checkpointable_layers: names of the classes whose layers may be recomputed; by default all layers with
            parameters.
        dynamic_shape: whether shapes between stages may change while those of the inputs do not.

    Attributes:
        parts: the bounds of the stages: stage p has layers ``parts[p]`` up to ``parts[p + 1]``.
        stage_id: this rank's stage.
        num_stages: the number of stages.
        context: this rank's groups and device.

    Raises:
        ConfigError: an argument is wrong, or the stages do not fit the world.
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        num_stages: int | None = None,
        topology: ProcessTopology | ParallelContext | None = None,
        loss_fn: Callable[..., object] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], object] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., object] = recompute,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ):
        super().__init__()
        if checkpointable_layers is not None and not isinstance(checkpointable_layers, list):
            raise ConfigError(
                "`checkpointable_layers` must be a list of class names, but is a "
                f"{type(checkpointable_layers).__name__}; put it into a list"
            )
        self.loss_fn, self.dynamic_shape = loss_fn, dynamic_shape
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = checkpointable_layers
        self.set_checkpoint_interval(activation_checkpoint_interval)
        self._grid = PipelineParallelGrid(_topology(num_stages, topology))
        self.context, self.global_rank = self._grid.context, self._grid.global_rank
        self.num_stages, self.stage_id = self._grid.pipe_parallel_size, self._grid.stage_id
        self.is_last_stage = self._grid.is_last_stage
        self._layer_specs = list(layers)
        _refuse_init(self.context)

        def count() -> list[int]:
            return [trained_parameters(layer) for layer in self._layer_specs]

        names = [name_of(layer) for layer in self._layer_specs]
        self.parts = split_layers(partition_method, self.num_stages, names, count)
        self._refuse_shared()
        start, stop = self.parts[self.stage_id : self.stage_id + 2]
        self.build_layers(self._layer_specs[start:stop], start)
        self.to(self.context.device)
        self.ties = self._find_ties()
        self._copy_ties()

    @property
    def partitions(self) -> list[int]:
        """The bounds of the stages."""
        return self.parts

    def stage_owner(self, layer_idx: int) -> int:
        """The stage of a layer.

        Raises:
            ConfigError: there is no such layer.
        """
        if not 0 <= layer_idx < len(self._layer_specs):
            raise ConfigError(
                f"`layer_idx` must be below the number of layers ({len(self._layer_specs)}), but is "
                f"{layer_idx}; count from 0"
            )
        return next(stage for stage in range(self.num_stages) if layer_idx < self.parts[stage + 1])

    def topology(self) -> ProcessTopology:
        """The coordinates of all ranks."""
        return self._grid.topology()

    def mpu(self) -> PipelineParallelGrid:
        """This rank's coordinates and groups."""
        return self._grid

    def num_pipeline_stages(self) -> int:
        """The number of stages."""
        return self.num_stages

    def get_additional_losses(self) -> dict[str, Tensor | float] | None:
        """Further losses to report, by name; a subclass may override this."""
        return None

    def _find_ties(self) -> dict[str, TieGroup]:
        """Key -> the group of stages, for each key of this stage that other stages have too."""
        stages: dict[str, set[int]] = {}
        for number, layer in enumerate(self._layer_specs):
            if isinstance(layer, TiedLayerSpec):
                stages.setdefault(layer.key, set()).add(self.stage_owner(number))
        return {
            key: TieGroup(self.context.pp, list(holders))
            for key, holders in sorted(stages.items())
            if len(holders) > 1 and self.stage_id in holders
        }

    def _refuse_shared(self) -> None:
        """Refuse a module with parameters that two stages use, because its copies would diverge."""
        first: dict[int, int] = {}
        for number, layer in enumerate(self._layer_specs):
            if isinstance(layer, nn.Module) and any(True for _ in layer.parameters()):
                earlier = first.setdefault(id(layer), number)
                if self.stage_owner(earlier) != self.stage_owner(number):
                    raise ConfigError(
                        f"`layers` must name a module that two stages use in a TiedLayerSpec, but layers "
                        f"{earlier} and {number} are the same {type(layer).__name__}; use TiedLayerSpec"
                    )


def _topology(
    num_stages: int | None, topology: ProcessTopology | ParallelContext | None
) -> ProcessTopology | ParallelContext:
    if topology is not None:
        return topology
    if num_stages is None:
        raise ConfigError("`num_stages` or `topology` must be given, but neither is; say how many stages")
    world = (joined_world() or (0, Launch.from_environment().world_size))[1]
    if num_stages < 1 or world % num_stages:
        raise ConfigError(
            f"`num_stages` must divide the number of ranks ({world}), but is {num_stages}; start a multiple "
            "of it, or choose a divisor"
        )
    return PipeDataParallelTopology(num_stages, world // num_stages)


def _refuse_init(context: ParallelContext) -> None:
    """Refuse a `zero.Init` that would shard this stage's layers over the ranks of other stages."""
    for hook in torch_module._global_module_registration_hooks.values():
        init = getattr(hook, "__self__", None)
        if isinstance(init, Init) and init.context.replica.ranks != context.replica.ranks:
            raise ConfigError(
                "`zero.Init` must be told of the stages around a PipelineModule, but is not; leave it out: "
                "each rank builds its own stage's layers only"
            )
