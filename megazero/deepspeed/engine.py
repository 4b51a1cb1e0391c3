"""The engine that `megazero.initialize` returns: a module whose backward and step are ours.

Members have DeepSpeed's names and do what they do there. `stepping.py` holds the training step, `answers.py`
the queries of a script.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megazero.deepspeed.checkpoint import (
    LoadParts,
    load_checkpoint,
    module_state,
    save_checkpoint,
    save_module,
)
from megazero.deepspeed.stepping import SteppingEngine
from megazero.deepspeed.tenancy import Tenancy
from megazero.errors import CheckpointError
from megazero.mpu.context import ParallelContext
from megazero.mpu.messages import gather_values


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
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write everything needed to continue to ``save_dir/tag``; every rank calls this.

        Args:
            save_dir: a folder that every rank sees.
            tag: by default ``global_step`` and the number of steps; the same on every rank.
            client_state: the script's own plain values and tensors.
            save_latest: name it in ``save_dir/latest``, which `load_checkpoint` reads.
            exclude_frozen_parameters: leave these out.

        Raises:
            CheckpointError: it cannot be written, the ranks give different tags, or `client_state` holds more
                than plain values and tensors.
        """
        folder = folder_of(save_dir, "save_dir")
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        check_tag(tag, self.context)
        state = vars(client_state) if isinstance(client_state, Namespace) else client_state or {}
        save_checkpoint(self, folder, tag, dict(state), save_latest)
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Continue from a checkpoint of `save_checkpoint`, on any number of replicas and at any stage.

        Args:
            load_dir: the folder given to `save_checkpoint`.
            tag: by default the one that ``latest`` names; without that file nothing is loaded.
            load_module_strict: refuse a checkpoint that lacks weights of this module.
            load_optimizer_states: False leaves moments, loss scale and parameter groups as they are.
            load_lr_scheduler_states: False leaves the schedule as it is.
            load_module_only: load only weights and buffers.
            custom_load_fn: refused; change the weights after loading.

        Returns:
            The checkpoint's folder and the `client_state`; None and None if there is none.

        Raises:
            CheckpointError: it is missing, damaged, or belongs to another model or optimizer.
        """
        folder = folder_of(load_dir, "load_dir")
        if custom_load_fn is not None:
            raise CheckpointError(
                "`custom_load_fn` must be left out, as checkpoints hold slices by name and no state that it "
                "could be given, but is a function; change the weights after `load_checkpoint`"
            )
        if tag is not None:
            check_tag(str(tag), self.context)
        whole = not load_module_only
        trains = whole and not self.states.idle
        parts = LoadParts(
            load_module_strict,
            load_optimizer_states and trains,
            load_lr_scheduler_states and trains,
            whole,
        )
        return load_checkpoint(self, folder, tag, parts)

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's weights and buffers, whole, on the CPU; every rank calls this.

        Args:
            destination: receives them too.
            prefix: stands before each name.
            keep_vars: without effect; whole weights are copies.
            exclude_frozen_parameters: leave these out.
        """
        state = {
            f"{prefix}{name}": value for name, value in module_state(self, exclude_frozen_parameters).items()
        }
        if destination is None:
            return state
        destination.update(state)
        return destination

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Load whole weights into the module; every rank calls this.

        Args:
            checkpoint: its entry `module` is the state.
            strict: as in torch.
            custom_load_fn: called with ``src=`` the state and ``dst=`` the module instead.
            fetch_z3_params: without effect; sharded weights are always gathered.
        """
        state = checkpoint["module"]
        with self.states.parallel.gathered(write_back=True):
            if custom_load_fn is None:
                self.module.load_state_dict(state, strict=strict)
            else:
                custom_load_fn(src=state, dst=self.module)

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
        folder = folder_of(save_dir, "save_dir")
        if self.zero_optimization_stage() == 3 and not self.settings.extras.gather_16bit_weights_on_save:
            return False
        save_module(self, folder / save_filename, exclude_frozen_parameters)
        return True

    save_fp16_model = save_16bit_model

    def _consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        """The module's whole state on the first rank, None on the others; every rank calls this."""
        state = module_state(self, exclude_frozen_parameters)
        return state if self.context.rank == 0 else None

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def empty_partition_cache(self) -> None:
        """Free all weights that are gathered."""
        self.states.parallel.release(0)

    def stay(self, tenancy: Tenancy) -> None:
        """Note what the engine has put on the module, for `destroy` to take off."""
        self._tenancy = tenancy
        tenancy.serve(self._script)

    def destroy(self) -> None:
        """Let go of the module; every rank calls this. It can no longer be trained by this engine.

        At stage 3 its weights stay sharded, as within `zero.Init`. Monitors and process groups stay open.
        """
        self._tenancy.end(whole=False)


def folder_of(folder: Any, name: str) -> Path:
    """A folder that a script has named.

    Raises:
        CheckpointError: it is none.
    """
    if not isinstance(folder, (str, Path)) or not str(folder):
        shown = "empty" if folder == "" else f"of type {type(folder).__name__}"
        raise CheckpointError(
            f"`{name}` must be the path of a folder, but is {shown}; name the folder of the checkpoints"
        )
    return Path(folder)


def check_tag(tag: str, context: ParallelContext) -> None:
    """Refuse tags that differ; every rank calls this.

    Raises:
        CheckpointError: they differ, on every rank.
    """
    tags = gather_values(context.world, tag, context.device)
    other = next((rank for rank, each in enumerate(tags) if each != tags[0]), None)
    if other is not None:
        raise CheckpointError(
            f"`tag` must be the same on every rank, but is {tags[0]!r} on rank 0 and {tags[other]!r} on rank "
            f"{other}; make it from values that all ranks have, such as `engine.global_steps`"
        )
