"""Training a user's model sliced over tensor-parallel ranks (DeepSpeed's AutoTP)."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megazero.config.deepspeed.load import load_ds_config
from megazero.deepspeed.comm.mpu import DeepSpeedMpu
from megazero.deepspeed.tensor_parallel.cutter import Cutter, synchronise
from megazero.deepspeed.tensor_parallel.policy import SlicingPolicy, slice_model
from megazero.errors import ConfigError, DataError
from megazero.mpu.context import ParallelContext
from megazero.mpu.group import Group

SECTION = "tensor_parallel"
_EFFECT = frozenset({"autotp_size", "partition_config", "preset_model", "tp", SECTION})
_NO_EFFECT = frozenset(
    {
        "dtype",
        "tp_overlap_comm",
        "vocab_parallel_lm_head",
        "vocab_parallel_ce_backend",
        "keep_module_on_host",
        "replace_with_kernel_inject",
    }
)
_REFUSED = MappingProxyType({"injection_policy_tuple": "give `partition_config`"})
_DTYPES = MappingProxyType(
    {"fp16": torch.float16, "half": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
)


@dataclass(frozen=True)
class TensorParallelRequest:
    """The number of ranks to slice a model over for training, and the rules.

    Attributes:
        size: the number of tensor-parallel ranks; 1 slices nothing, and 0 is unspecified.
        policy: chooses the rules.
        dtype: the dtype that `tp_model_init` was given; None if it was not called.
        group: the script's own process group of the tensor-parallel ranks.
    """

    size: int = 0
    policy: SlicingPolicy = field(default_factory=SlicingPolicy)
    dtype: torch.dtype | None = None
    group: Any = None

    @classmethod
    def read(cls, section: Mapping[str, Any]) -> TensorParallelRequest:
        """Read the section `tensor_parallel` of a JSON.

        Raises:
            ConfigError: a key or a value is unknown.
        """
        for key in section:
            if key in _REFUSED:
                raise ConfigError(f"`{SECTION}.{key}` must be left out here; {_REFUSED[key]}")
            if key not in _EFFECT | _NO_EFFECT:
                raise ConfigError(
                    f"`{SECTION}` must have the keys {', '.join(sorted(_EFFECT | _NO_EFFECT))}, but has "
                    f"{key}; leave it out"
                )
        if without := sorted(key for key in _NO_EFFECT if section.get(key)):
            warnings.warn(f"keys of `{SECTION}` without effect here: {', '.join(without)}", stacklevel=3)
        inner = section.get("tp") or section.get(SECTION) or {}
        sizes = {section.get("autotp_size") or 0, inner.get("tp_size") or 0} - {0}
        if len(sizes) > 1 or any(not isinstance(size, int) or size < 0 for size in sizes):
            raise ConfigError(
                f"`{SECTION}.autotp_size` must be the number of ranks, as `tp_size` is, but they are "
                f"{section.get('autotp_size')} and {inner.get('tp_size')}; give one of them"
            )
        if inner.get("mpu") is not None:
            raise ConfigError(f"`{SECTION}.tp.mpu` must be left out here; pass `mpu` to `initialize`")
        return cls(sizes.pop() if sizes else 0, SlicingPolicy.read(section), group=inner.get("tp_group"))

    def within(self, model: nn.Module, weights: torch.dtype) -> TensorParallelRequest:
        """Merge this request of the JSON with the one that `tp_model_init` recorded on the model.

        Raises:
            ConfigError: the two contradict each other.
        """
        recorded = model.__dict__.get("tensor_parallel_request")
        if not isinstance(recorded, TensorParallelRequest):
            return self
        if self.size not in (0, recorded.size):
            raise ConfigError(
                f"`{SECTION}.autotp_size` must be the `tp_size` of `tp_model_init` ({recorded.size}), but is "
                f"{self.size}; give one of them"
            )
        if recorded.dtype not in (None, weights):
            raise ConfigError(
                f"`dtype` of `tp_model_init` must be the dtype of weights in the configuration ({weights}), "
                f"but is {recorded.dtype}; enable `bf16` or `fp16`, or pass that dtype"
            )
        own = self.policy if self.policy != SlicingPolicy() else recorded.policy
        return replace(self, size=recorded.size, policy=own, group=self.group or recorded.group)

    def layout(self, mpu: object) -> object:
        """Return `mpu`, or one with `size` tensor-parallel ranks for `find_context` if `mpu` is None.

        Raises:
            ConfigError: `mpu` has another number of tensor-parallel ranks, or there is also a `tp_group`.
        """
        if self.group is not None and mpu is not None:
            raise ConfigError(
                "`tp_group` must be left out beside `mpu`, which says the same; pass one of them"
            )
        if self.size <= 1:
            return mpu
        if mpu is None:
            return _TensorParallelMpu(self.size)
        context = mpu.context if isinstance(mpu, DeepSpeedMpu) else mpu
        if isinstance(context, ParallelContext):
            size = context.tp.size
        else:
            names = ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size")
            size = next((getattr(mpu, name)() for name in names if hasattr(mpu, name)), 1)
        if size != self.size:
            raise ConfigError(
                f"`mpu` or `mesh_param` must have as many tensor-parallel ranks as `{SECTION}.autotp_size` "
                f"({self.size}), but has {size}; leave one of them out"
            )
        return mpu

    def shares(self, mpu: object, context: ParallelContext) -> int:
        """Return the number of ranks whose micro-batches `train_batch_size` counts.

        As in DeepSpeed, without an `mpu` every rank of a sliced model counts, although tensor-parallel ranks
        read the same samples.
        """
        return context.world_size if self.size > 1 and mpu is None else context.data.size

    def apply(self, model: nn.Module, context: ParallelContext) -> None:
        """Slice the model in place, and copy the first rank's random state to all ranks.

        Raises:
            ConfigError: the model cannot be sliced.
        """
        if self.size <= 1:
            return
        self.check_group(context)
        slice_model(Cutter(model, context.tp, trained=True), self.policy)
        synchronise(context.tp, context.device)
        check = BatchCheck(context.tp, context.device)
        check.hook = model.register_forward_pre_hook(check, with_kwargs=True)

    def check_group(self, context: ParallelContext) -> None:
        """Raise ConfigError if the script's process group is not that of the tensor-parallel ranks."""
        if self.group is not None and (self.group.size(), self.group.rank()) != (self.size, context.tp.rank):
            raise ConfigError(
                f"`tp_group` must hold {self.size} adjacent ranks in their order, but does not; leave it out"
            )


class _TensorParallelMpu:
    """An `mpu` with only the number of tensor-parallel ranks."""

    def __init__(self, size: int):
        self.size = size

    def get_tensor_model_parallel_world_size(self) -> int:
        """Return the number of tensor-parallel ranks."""
        return self.size


class BatchCheck:
    """A hook before the first forward, which checks that tensor-parallel ranks read the same batch.

    Args:
        group: the tensor-parallel ranks.
        device: the device of the group's tensors.
    """

    def __init__(self, group: Group, device: torch.device):
        self.group, self.device = group, device
        self.hook: RemovableHandle | None = None

    def __call__(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Compare the batches, once.

        Raises:
            DataError: the batches differ.
        """
        if self.hook is not None:
            self.hook.remove()
        digest = hashlib.blake2b(digest_size=8)
        for value in _tensors([*args, *(kwargs[key] for key in sorted(kwargs))]):
            digest.update(str((tuple(value.shape), value.dtype)).encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        own = torch.tensor([int.from_bytes(digest.digest(), "big", signed=True)], device=self.device)
        digests = own.new_empty(self.group.size)
        self.group.all_gather(digests, own).wait()
        if (digests != digests[0]).any():
            raise DataError(
                f"the tensor-parallel ranks {list(self.group.ranks)} must read the same batch, but their "
                "first ones differ; give them one sampler rank (`data_parallel_rank`) and one seed"
            )


def _tensors(value: object) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and mappings."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for key in sorted(value, key=str) for tensor in _tensors(value[key])]
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype, config: object = None, **kwargs: Any
) -> nn.Module:
    """Record on a model that `initialize` is to slice it over `tp_size` ranks.

    Args:
        model: the whole model.
        tp_size: the number of tensor-parallel ranks, which are adjacent.
        dtype: the dtype of the weights; `initialize` checks it against its configuration.
        config: the path or the content of a JSON with a section `tensor_parallel`.
        kwargs: `tp_group`, a process group of the tensor-parallel ranks.

    Returns:
        The model.

    Raises:
        ConfigError: an argument is unknown, or an earlier call had other arguments.
    """
    section = {} if config is None else load_ds_config(config).get(SECTION, {})
    group = kwargs.pop("tp_group", None)
    if kwargs:
        raise ConfigError(f"`tp_model_init` must have known arguments, but has {', '.join(kwargs)}")
    if not isinstance(tp_size, int) or tp_size < 1:
        raise ConfigError(f"`tp_size` must be at least 1, but is {tp_size}")
    read = TensorParallelRequest.read({**section, "autotp_size": section.get("autotp_size") or tp_size})
    request = replace(read, size=tp_size, dtype=_DTYPES.get(str(dtype), dtype), group=group or read.group)
    if read.size not in (0, tp_size):
        raise ConfigError(
            f"`tp_size` must be the `autotp_size` of `config` ({read.size}), but is {tp_size}; give one of "
            "them"
        )
    if model.__dict__.get("tensor_parallel_request", request) != request:
        raise ConfigError("`tp_model_init` must be called once for a model, or with the same arguments")
    model.__dict__["tensor_parallel_request"] = request
    return model
