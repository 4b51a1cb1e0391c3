"""Replacing the modules of a model by slices of themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megazero.deepspeed.tensor_parallel.layers import ColumnSlicedLinear, PartialSums, RowSlicedLinear
from megazero.deepspeed.tensor_parallel.slices import SlicedWeight, WeightPiece, slice_parameter
from megazero.deepspeed.zero.partition import partition_of
from megazero.errors import ConfigError
from megazero.mpu.group import Group

_EXPERT_FEATURES = 8  # torch's grouped matmul needs rows that are multiples of 16 bytes


@dataclass(frozen=True)
class Cutter:
    """Slices modules of one model.

    Attributes:
        model: the model, whole; afterwards this rank's slice of it.
        group: the ranks that the model is sliced over.
        trained: whether the model will be trained; if not, each rank keeps only what it uses.
    """

    model: nn.Module
    group: Group
    trained: bool

    def column(self, path: str, pieces: Sequence[WeightPiece], *, gather: bool = False) -> None:
        """Slice the outputs of a linear layer.

        Args:
            path: the path of the layer.
            pieces: the pieces that make up the outputs.
            gather: whether forward gathers the outputs of all ranks.

        Raises:
            ConfigError: outputs of several pieces are to be gathered.
        """
        if gather and len(pieces) > 1:
            raise ConfigError(
                f"`gather_output` must be false for `{path}`, which holds {len(pieces)} weights, but is "
                "true; skip the layer to keep it whole"
            )
        linear = self.model.get_submodule(path)
        inputs_first = not isinstance(linear, nn.Linear)
        whole = self.trained and len(pieces) == 1 and pieces[0].used is not None
        used = pieces[0].used if whole else None
        width = sum(piece.width for piece in pieces)
        for name, param in linear.named_parameters():
            dim = 1 if inputs_first and name == "weight" else 0
            self.parameter(f"{path}.{name}", param, dim, pieces, whole)
        self._replace(path, ColumnSlicedLinear(linear, self.group, used, width if gather else None))

    def row(self, path: str, piece: WeightPiece) -> None:
        """Slice the inputs of a linear layer."""
        linear = self.model.get_submodule(path)
        weight: nn.Parameter = linear.weight  # type: ignore[assignment]
        dim = 1 if isinstance(linear, nn.Linear) else 0
        self.parameter(f"{path}.weight", weight, dim, (piece,))
        self._replace(path, RowSlicedLinear(linear, self.group))

    def experts(self, path: str, hidden: int) -> None:
        """Slice the hidden features of stacked experts, `gate_up_proj` [e, 2f, h] and `down_proj` [e, h, f].

        Raises:
            ConfigError: the module has other parameters.
        """
        module = self.model.get_submodule(path)
        shapes = {name: tuple(param.shape) for name, param in module.named_parameters()}
        count, _, width = shapes.get("down_proj", (0, 0, 0))
        if shapes != {"gate_up_proj": (count, 2 * width, hidden), "down_proj": (count, hidden, width)}:
            raise ConfigError(
                f"`{path}` must hold `gate_up_proj` [experts, 2 f, h] and `down_proj` [experts, h, f], but "
                f"holds {shapes}; train or run a model with this layout on one tensor-parallel rank"
            )
        half = WeightPiece(width, width, align=_EXPERT_FEATURES)
        for name, dim, pieces in (("gate_up_proj", 1, (half, half)), ("down_proj", 2, (half,))):
            self.parameter(f"{path}.{name}", module.get_parameter(name), dim, pieces)
        sums = PartialSums(self.group)
        module.register_forward_pre_hook(sums.share, with_kwargs=True)
        module.register_forward_hook(sums.total)

    def parameter(
        self, name: str, param: nn.Parameter, dim: int, pieces: Sequence[WeightPiece], whole: bool = False
    ) -> None:
        """Slice one parameter, unless it is tied and has been sliced already."""
        if "sliced" in param.__dict__:
            return
        home = partition_of(param)
        if home is not None:  # `zero.Init` sharded it over ranks that now hold different slices
            param.data = home.whole()
            del param.__dict__["shard_holder"], param.__dict__["__deepcopy__"]
        sliced = SlicedWeight(name, tuple(param.shape), dim, tuple(pieces), whole)
        slice_parameter(param, sliced, self.group, trained=self.trained)

    def shared(self, path: str) -> None:
        """Mark a module whose parameters get a partial gradient on each rank."""
        for name, param in self.model.get_submodule(path).named_parameters():
            piece = WeightPiece(param.shape[0], 1, (0, param.shape[0]))
            self.parameter(f"{path}.{name}", param, 0, (piece,), whole=True)

    def head(self, embeddings: nn.Module | None, head: nn.Linear) -> None:
        """Slice the vocabulary of the output layer and gather its outputs, unless the layer is tied."""
        if getattr(embeddings, "weight", None) is head.weight:
            return
        path = next(name for name, module in self.model.named_modules() if module is head)
        self.column(path, (WeightPiece(head.out_features, head.out_features),), gather=True)

    def _replace(self, path: str, module: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        old = self.model.get_submodule(path)
        module.train(old.training)
        owner = self.model.get_submodule(parent)
        owner._modules[name] = module


def synchronise(group: Group, device: torch.device) -> None:
    """Copy the first rank's random state to all ranks, so that they draw the same numbers."""
    if group.size == 1:
        return
    state = torch.get_rng_state().to(device)
    group.broadcast(state, 0).wait()
    torch.set_rng_state(state.cpu())
    if device.type == "cuda":
        state = torch.cuda.get_rng_state(device).to(device)
        group.broadcast(state, 0).wait()
        torch.cuda.set_rng_state(state.cpu(), device)
