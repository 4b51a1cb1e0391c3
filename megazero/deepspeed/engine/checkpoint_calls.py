"""An engine's calls that save and load checkpoints and whole weights, by DeepSpeed's names."""

from __future__ import annotations

import os
import warnings
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megazero.deepspeed.asserted import asserts
from megazero.deepspeed.checkpoint.tags import agree_on_tag, folder_of, newest_tag, warn_of_nothing
from megazero.deepspeed.engine.checkpoint import (
    CustomLoad,
    LoadParts,
    load_checkpoint,
    load_module_state,
    save_checkpoint,
)
from megazero.deepspeed.engine.state import EngineState
from megazero.deepspeed.engine.weights import frozen_names, module_state, save_module
from megazero.errors import ConfigError


class CheckpointCalls:
    """An engine's calls that save and load checkpoints and whole weights."""

    def __init__(self, state: EngineState):
        self.state = state

    @asserts
    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, object] | Namespace | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint to ``save_dir/tag``; every rank calls this.

        Args:
            save_dir: a folder that every rank sees.
            tag: by default ``global_step`` and the number of steps. If ranks give different tags, rank 0's
                is used, and the JSON's `checkpoint.tag_validation` decides whether this is an error.
            client_state: the script's own values, kept apart from the engine's. Values that are neither
                plain nor tensors are pickled.
            save_latest: write the tag to ``save_dir/latest``, which `load_checkpoint` reads.
            exclude_frozen_parameters: leave out frozen parameters; loading then leaves them unchanged.

        Raises:
            CheckpointError: it cannot be written, or a value in `client_state` cannot be pickled.
            CommunicationError: not every rank calls this.
        """
        folder = folder_of(save_dir, "save_dir")
        own = f"global_step{self.state.global_steps}" if tag is None else tag
        validation = self.state.settings.extras.checkpoint.tag_validation.lower()
        chosen = agree_on_tag(own, "save_checkpoint", self.state.context, validation)
        client = vars(client_state) if isinstance(client_state, Namespace) else dict(client_state or {})
        left_out = frozen_names(self.state.module) if exclude_frozen_parameters else ()
        save_checkpoint(self.state, folder, chosen, client, save_latest, left_out)
        return True

    @asserts
    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: CustomLoad | None = None,
    ) -> tuple[str | None, dict[str, object] | None]:
        """Load a checkpoint, written by any number of replicas at any ZeRO stage; every rank calls this.

        It may be DeepSpeed's own, universal checkpoints included.

        Args:
            load_dir: the folder given to `save_checkpoint`.
            tag: by default the tag in ``latest``; without that file nothing is loaded.
            load_module_strict: refuse a checkpoint with missing or unexpected weights.
            load_optimizer_states: load moments, loss scale and the options of parameter groups.
            load_lr_scheduler_states: load the schedule's state.
            load_module_only: load only weights and buffers.
            custom_load_fn: loads the weights instead; called with the saved weights as `src` and the module,
                whose parameters are whole, as `dst`.

        Returns:
            The checkpoint's folder and its `client_state`. If there is no checkpoint, both are None, with a
            warning.

        Raises:
            CheckpointError: it is missing, damaged, belongs to another model or optimizer, or pickles a class
                that is not trusted.
        """
        folder = folder_of(load_dir, "load_dir")
        own = newest_tag(folder) if tag is None else tag
        chosen = agree_on_tag(own or "", "load_checkpoint", self.state.context)
        if not chosen:
            if self.state.context.rank == 0:
                warn_of_nothing(folder)
            return None, None
        whole = not load_module_only
        trains = whole and not self.state.states.idle
        parts = LoadParts(
            load_module_strict,
            load_optimizer_states and trains,
            load_lr_scheduler_states and trains,
            whole,
            custom_load_fn,
        )
        return str(folder / chosen), load_checkpoint(self.state, folder / chosen, parts)

    def _get_optimizer_ckpt_name(
        self, checkpoints_path: str | os.PathLike[str], tag: object, expp_rank: int
    ) -> str:
        """The path of the optimizer file of a rank's experts in a folder that DeepSpeed wrote."""
        name = f"expp_rank_{expp_rank}_mp_rank_{self.state.context.tp.rank:02d}_optim_states.pt"
        return os.path.join(checkpoints_path, str(tag), name)

    def module_state_dict(
        self,
        destination: dict[str, Tensor] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Tensor]:
        """The module's whole weights and buffers on the CPU, at any stage; every rank calls this.

        Args:
            destination: the dictionary to fill; by default a new one.
            prefix: put before each name.
            keep_vars: return the parameters themselves instead of copies.
            exclude_frozen_parameters: leave out frozen parameters.

        Raises:
            ConfigError: `keep_vars` is set at stage 3.
        """
        state: Mapping[str, Tensor]
        if not keep_vars:
            state = module_state(self.state, exclude_frozen_parameters)
        elif self.state.settings.zero.stage == 3:
            raise ConfigError(
                "`keep_vars` must be False at stage 3, where weights are sharded, but is True; leave it out"
            )
        else:
            frozen = frozen_names(self.state.module) if exclude_frozen_parameters else set()
            own = self.state.module.state_dict(keep_vars=True)
            state = {name: value for name, value in own.items() if name not in frozen}
        result = {} if destination is None else destination
        result.update({prefix + name: value for name, value in state.items()})
        return result

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: CustomLoad | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Load whole weights into the module; every rank calls this with the same weights.

        Args:
            checkpoint: holds the weights under the key `module`.
            strict: refuse missing and unexpected names.
            custom_load_fn: loads the weights instead; called with them as `src` and the module as `dst`.
            fetch_z3_params: has no effect: weights are always gathered while they are loaded.

        Raises:
            CheckpointError: names or shapes differ from the module's.
        """
        load_module_state(self.state, checkpoint["module"], strict, custom_load_fn)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the result of `module_state_dict` to a file; every rank calls this.

        Args:
            save_dir: the folder; it is made if it does not exist.
            save_filename: a name that ends in ``.safetensors`` chooses that format, any other torch's.
            exclude_frozen_parameters: leave out frozen parameters.

        Returns:
            Whether the file was written: at stage 3 without `stage3_gather_16bit_weights_on_model_save` it is
            not, with a warning.

        Raises:
            CheckpointError: it cannot be written.
        """
        folder, settings = folder_of(save_dir, "save_dir"), self.state.settings
        if settings.zero.stage == 3 and not settings.extras.gather_16bit_weights_on_save:
            if self.state.context.rank == 0:
                warnings.warn(
                    f"`{folder / save_filename}` is not written: at stage 3 the JSON must say "
                    "`stage3_gather_16bit_weights_on_model_save`, which gathers whole weights",
                    stacklevel=2,
                )
            return False
        save_module(self.state, folder / save_filename, exclude_frozen_parameters)
        return True

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor] | None:
        """The whole weights on rank 0, None elsewhere; every rank calls this."""
        if self.state.settings.zero.stage != 3:
            raise ConfigError(
                f"`stage` must be 3 to gather sharded weights, but is {self.state.settings.zero.stage}; call "
                "`_consolidated_16bit_state_dict`, or `module.state_dict()`"
            )
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor] | None:
        """The whole weights on rank 0, None elsewhere, at any stage; every rank calls this."""
        first = self.state.context.rank == 0
        state = module_state(self.state, exclude_frozen_parameters, keep=first)
        return state if first else None
