"""The engine that `megazero.initialize` returns: a module whose backward and step are ours.

Members have DeepSpeed's names and do what they do there. `stepping.py` holds the training step, `answers.py`
the queries of a script.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megazero.deepspeed.checkpoint import (
    LoadParts,
    load_checkpoint,
    module_state,
    save_checkpoint,
    save_module,
)
from megazero.deepspeed.stepping import SteppingEngine
from megazero.mpu.launch import leave


class DeepSpeedEngine(SteppingEngine):
    """Wraps a module of any kind: ``loss = engine(batch); engine.backward(loss); engine.step()``.

    Arguments, attributes and the training step are those of `SteppingEngine`. This class adds checkpoints and
    the end of the job.
    """

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> bool:
        """Write everything needed to continue to ``save_dir/tag``; every rank calls this.

        Args:
            save_dir: a folder that every rank sees.
            tag: by default ``global_step`` and the number of steps.
            client_state: the script's own plain values and tensors.
            save_latest: name it in ``save_dir/latest``, which `load_checkpoint` reads.

        Raises:
            CheckpointError: it cannot be written, or `client_state` holds more than plain values and tensors.
        """
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        save_checkpoint(self, Path(save_dir), tag, dict(client_state or {}), save_latest)
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Continue from a checkpoint of `save_checkpoint`, on any number of replicas and at any stage.

        Args:
            load_dir: the folder given to `save_checkpoint`.
            tag: by default the one that ``latest`` names; without that file nothing is loaded.
            load_module_strict: refuse a checkpoint that lacks weights of this module.
            load_optimizer_states: False leaves moments, loss scale and parameter groups as they are.
            load_lr_scheduler_states: False leaves the schedule as it is.
            load_module_only: load only weights and buffers.

        Returns:
            The checkpoint's folder and the `client_state`; None and None if there is none.

        Raises:
            CheckpointError: it is missing, damaged, or belongs to another model or optimizer.
        """
        whole = not load_module_only
        parts = LoadParts(
            load_module_strict, load_optimizer_states and whole, load_lr_scheduler_states and whole, whole
        )
        return load_checkpoint(self, Path(load_dir), tag, parts)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The module's weights and buffers, whole, on the CPU; every rank calls this."""
        return module_state(self, exclude_frozen_parameters)

    _consolidated_16bit_state_dict = module_state_dict

    def autotp_size(self) -> int:
        """The number of ranks that the model's layers are sliced over."""
        return self.context.tp.size

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write `module_state_dict` for use elsewhere; every rank calls this.

        Args:
            save_dir: the folder, made if it does not exist.
            save_filename: ``.safetensors`` chooses that format, anything else torch's.
            exclude_frozen_parameters: leave these out.

        Returns:
            False, with nothing written, at stage 3 without `stage3_gather_16bit_weights_on_model_save`.

        Raises:
            CheckpointError: it cannot be written.
        """
        if self.zero_optimization_stage() == 3 and not self.settings.extras.gather_16bit_weights_on_save:
            return False
        save_module(self, Path(save_dir) / save_filename, exclude_frozen_parameters)
        return True

    save_fp16_model = save_16bit_model

    def destroy(self) -> None:
        """End the job cleanly: close monitors, wait for the other ranks and leave the world."""
        self._reporter.close()
        leave(self.context)
