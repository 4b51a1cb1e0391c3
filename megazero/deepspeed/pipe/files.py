"""Write and read one file per layer, in DeepSpeed's format; any number of stages can load them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megazero.deepspeed.pipe.grid import PipelineParallelGrid
from megazero.deepspeed.pipe.stage import LayerFunction
from megazero.deepspeed.zero.gathered import GatheredParameters
from megazero.errors import CheckpointError
from megazero.formats.deepspeed.pickles import load_states


class LayerFiles:
    """The methods of a stage that write and read its layers' files."""

    forward_funcs: list[LayerFunction]
    _local_start: int
    _grid: PipelineParallelGrid

    def ckpt_prefix(self, checkpoints_path: str | os.PathLike[str], tag: str) -> str:
        """The prefix of the paths of this rank's other files, such as ``PATH/TAG/module-pipe_00``."""
        topology = self._grid.topology()
        place = topology.get_rank_repr(self._grid.global_rank, omit_axes=("data",))
        return str(Path(checkpoints_path, str(tag), f"module-{place}"))

    def ckpt_layer_path(self, ckpt_dir: str | os.PathLike[str], local_layer_idx: int) -> str:
        """The path of a layer of this stage; the file's name has the layer's number in the whole model."""
        name = f"layer_{self._local_start + local_layer_idx:02d}"
        slices = self._grid.topology().get_rank_repr(self._grid.global_rank)
        return str(Path(ckpt_dir, "-".join(part for part in (name, slices, "model_states.pt") if part)))

    def ckpt_layer_path_list(self, ckpt_dir: str | os.PathLike[str], local_layer_idx: int) -> list[str]:
        """The existing files of a layer of this stage, one per tensor-parallel rank."""
        name = f"layer_{self._local_start + local_layer_idx:02d}-*model_states.pt"
        return sorted(str(path) for path in Path(ckpt_dir).glob(name))

    def save_state_dict(
        self,
        save_dir: str | os.PathLike[str],
        checkpoint_engine: Any = None,
        exclude_frozen_params: bool = False,
    ) -> None:
        """Write the weights and buffers of each layer to its file; every rank calls this.

        A function has no file, nor has a tied layer with a `forward_fn`.

        Args:
            save_dir: a folder that every rank sees.
            checkpoint_engine: writes the files; by default `torch.save` does.
            exclude_frozen_params: leave out frozen parameters.
        """
        Path(save_dir).mkdir(parents=True, exist_ok=True)
        for place, layer in self._files():
            state = {}
            with GatheredParameters(layer.parameters()):
                frozen = {name for name, param in layer.named_parameters() if not param.requires_grad}
                for name, value in layer.state_dict().items():
                    if not (exclude_frozen_params and name in frozen):
                        # Cloned, because `torch.save` writes the whole storage of a view.
                        state[name] = value.detach().clone().cpu() if isinstance(value, Tensor) else value
            if self._grid.data_parallel_id == 0:
                path = self.ckpt_layer_path(save_dir, place)
                if checkpoint_engine is None:
                    torch.save(state, path)
                else:
                    checkpoint_engine.save(state_dict=state, path=path)
        self._grid.context.world.barrier()

    def load_state_dir(
        self, load_dir: str | os.PathLike[str], checkpoint_engine: object = None, strict: bool = True
    ) -> None:
        """Read the weights and buffers of each layer from its file; every rank calls this.

        Args:
            load_dir: the folder of `save_state_dict`, or of a checkpoint that DeepSpeed wrote.
            checkpoint_engine: has no effect, as in DeepSpeed.
            strict: refuse a file with missing or unexpected names.

        Raises:
            CheckpointError: a file is missing, is damaged, or does not fit its layer.
        """
        for place, layer in self._files():
            path = Path(self.ckpt_layer_path(load_dir, place))
            if not path.exists():
                raise CheckpointError(
                    f"`{path}` must hold layer {self._local_start + place}, but is not there; check it"
                )
            state = load_states(path)
            params: Sequence[nn.Parameter] = list(layer.parameters())
            source = self._grid.context.replica.ranks[0]
            with GatheredParameters(params, modifier_rank=source):
                try:
                    layer.load_state_dict(state, strict=strict)
                except (RuntimeError, TypeError) as error:
                    raise CheckpointError(f"`{path}` must fit its layer, but does not: {error}") from error
        self._copy_ties()

    def _copy_ties(self) -> None:
        """Broadcast tied weights from their first stage to the others."""
        raise NotImplementedError("the module has the tied weights")

    def _files(self) -> list[tuple[int, nn.Module]]:
        """This stage's layers that are modules, with their indices."""
        return [(i, func) for i, func in enumerate(self.forward_funcs) if isinstance(func, nn.Module)]
