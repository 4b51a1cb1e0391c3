"""`offload_states` and `reload_states`: move an engine's state to the host while others use the device."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from megazero.deepspeed.zero.parallel import UserParallel
from megazero.errors import ConfigError, MegazeroError
from megazero.zero.bucket import Bucket
from megazero.zero.store.store import WEIGHT


class OffloadDeviceEnum(str, Enum):
    """The destinations of offloaded state."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """The kinds of state that `offload_states` distinguishes."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


# Kind of state -> the methods of a store that need it.
_USES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "optim_states": ("stream", "at_rest"),
        "hp_params": ("stream", "at_rest", "open_weights", "adopt"),
        "lp_params": ("shard", "open_weights", "adopt"),
        "lp_grads": ("stream", "sums", "accumulate"),
    }
)


class OffloadedStates:
    """State of an engine in the host's memory until `reload`; methods that need it raise meanwhile.

    Storages are emptied and later refilled in place, so all tensors over them stay valid.

    Args:
        parallel: the data parallelism of the engine's module.
        kinds: the kinds to offload, of `OffloadStateTypeEnum`.
        pin: whether to use pinned memory.
        non_blocking: whether the host goes on while copies are in progress.
    """

    def __init__(self, parallel: UserParallel, kinds: Collection[str], *, pin: bool, non_blocking: bool):
        self.parallel = parallel
        self.kinds = set(kinds)
        self._copies: list[tuple[torch.UntypedStorage, Tensor]] = []
        parallel.free()
        storages = {
            storage.data_ptr(): storage
            for bucket in parallel.store.buckets
            for kind, storage in _storages(parallel, bucket)
            if kind in kinds and storage.nbytes()
        }
        weights = []
        if "lp_params" in kinds:
            weights = [b for b in parallel.store.buckets if _weights(parallel, b).data_ptr() in storages]
        else:  # in fp32 the masters are the weights, which forward still reads
            for bucket in parallel.store.buckets:
                storages.pop(_weights(parallel, bucket).data_ptr(), None)
        self._emptied = [bucket for bucket in weights if not bucket.layout.row.shard_params]
        for bucket in self._emptied:
            nan = torch.full((), float("nan"), device=bucket.full.device).to(bucket.key.dtype)
            for param in bucket.params:
                param.data = nan.expand(param.shape)
        for storage in storages.values():
            self._copies.append((storage, _offload(storage, pin=pin, non_blocking=non_blocking)))
        self._hook = parallel.module.register_forward_pre_hook(self._refuse_forward, prepend=True)
        for name in {name for kind in self.kinds for name in _USES[kind]}:
            setattr(parallel.store, name, self._refuse)

    def reload(self, *, non_blocking: bool = False) -> None:
        """Copy the state back into its storages."""
        for storage, copy in self._copies:
            storage.resize_(copy.numel())
            _bytes(storage).copy_(copy, non_blocking=non_blocking)
        for bucket in self._emptied:
            for param, view in zip(bucket.params, bucket.layout.views(bucket.full), strict=True):
                param.data = view
        self._copies, self._emptied = [], []
        self._hook.remove()
        for name in {name for kind in self.kinds for name in _USES[kind]}:
            delattr(self.parallel.store, name)

    @property
    def nbytes(self) -> int:
        """Bytes in the host's memory."""
        return sum(copy.numel() for _, copy in self._copies)

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise MegazeroError(
            f"the states of the engine must be on its device, but {', '.join(sorted(self.kinds))} are "
            "offloaded; call `engine.reload_states()` first"
        )

    def _refuse_forward(self, module: nn.Module, args: object) -> None:
        if "lp_params" in self.kinds:
            self._refuse()


class ZeroMemory:
    """Calls of an engine and of its optimizer that concern the memory of ZeRO.

    Args:
        parallel: the module's data parallelism.
    """

    def __init__(self, parallel: UserParallel):
        self._parallel = parallel

    def offload_states(
        self,
        include: Collection[OffloadStateTypeEnum | str] | None = None,
        device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move state to the host's memory until `reload_states`, to free the device for other work.

        State that the JSON offloads to the host or to disk stays there.

        Args:
            include: the kinds to move; None for all. In fp32, `hp_params` are the weights themselves.
            device: ``cpu``; ``none`` does nothing.
            pin_memory: whether to use pinned memory, if the device is a CUDA device.
            non_blocking: whether the host goes on while copies are in progress.

        Raises:
            ConfigError: a kind or the device is unknown, or the JSON offloads the weights.
        """
        place, kinds = OffloadDeviceEnum(_known(device, OffloadDeviceEnum, "device")), _kinds(include)
        if place is OffloadDeviceEnum.none:
            warnings.warn("`offload_states` with the device none moves nothing", stacklevel=2)
            return
        if place is OffloadDeviceEnum.nvme:
            raise ConfigError(
                "`device` must be cpu, but is nvme; set `offload_optimizer` in the JSON for that"
            )
        parallel = self._parallel
        if getattr(getattr(parallel.store, "placement", None), "parameters", None) is not None:
            raise ConfigError(
                "`offload_states` must be called without `offload_param` in the JSON, but that is set; the "
                "weights are offloaded already"
            )
        if parallel.offloaded is not None:
            kinds |= parallel.offloaded.kinds
            self.reload_states()
        parallel.offloaded = OffloadedStates(
            parallel,
            kinds,
            pin=pin_memory and parallel.store.buckets[0].full.is_cuda,
            non_blocking=non_blocking,
        )

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move state that `offload_states` has offloaded back to the device."""
        if (offloaded := self._parallel.offloaded) is not None:
            offloaded.reload(non_blocking=non_blocking)
            self._parallel.offloaded = None

    def empty_partition_cache(self) -> None:
        """Free the weights that stage 3 keeps gathered for their next use."""
        self._parallel.free()


def state_devices(model: Any, state: OffloadStateTypeEnum | str) -> set[torch.device]:
    """The devices that a kind of an engine's state is on (DeepSpeed's `get_state_devices`)."""
    (kind,) = _kinds([state])
    parallel: UserParallel = model.states.parallel
    if parallel.offloaded is not None and kind in parallel.offloaded.kinds:
        return {torch.device("cpu")}
    return {
        storage.device
        for bucket in parallel.store.buckets
        for stored, storage in _storages(parallel, bucket)
        if stored == kind
    }


def _kinds(include: Collection[OffloadStateTypeEnum | str] | None) -> set[str]:
    """The names of kinds; `contiguous_grad_buffer` is one with `lp_grads`: both are the gradient sums."""
    if isinstance(include, str):
        include = [include]
    wanted = {_known(kind, OffloadStateTypeEnum, "include") for kind in include or OffloadStateTypeEnum}
    return {"lp_grads" if kind == "contiguous_grad_buffer" else kind for kind in wanted}


def _known(value: object, kinds: type[Enum], name: str) -> str:
    text = str(getattr(value, "value", value))
    known = [kind.value for kind in kinds]
    if text not in known:
        raise ConfigError(f"`{name}` must be one of {', '.join(known)}, but is {text}")
    return text


def _weights(parallel: UserParallel, bucket: Bucket) -> torch.UntypedStorage:
    """The storage of the weights that this rank keeps of a bucket."""
    sharded = bucket.layout.row.shard_params
    return parallel.store.shard(bucket).untyped_storage() if sharded else bucket.storage


def _storages(parallel: UserParallel, bucket: Bucket) -> Iterator[tuple[str, torch.UntypedStorage]]:
    """The kinds and storages of a bucket's state on the device."""
    store = parallel.store
    yield "lp_params", _weights(parallel, bucket)
    for kind, flat in store.at_rest(bucket).items():
        no_master = kind == WEIGHT and not bucket.key.trainable
        if not no_master and kind not in store.offloaded.get(bucket, ()):
            yield "hp_params" if kind == WEIGHT else "optim_states", flat.untyped_storage()
    if bucket.key.trainable and not (store.tiers and bucket.layout.row.shard_grads):
        yield "lp_grads", store.sums(bucket).untyped_storage()


def _offload(storage: torch.UntypedStorage, *, pin: bool, non_blocking: bool) -> Tensor:
    """Copy a storage's bytes to the host, and empty the storage."""
    content = _bytes(storage)
    copy = torch.empty(content.numel(), dtype=torch.uint8, pin_memory=pin)
    copy.copy_(content, non_blocking=non_blocking)
    storage.resize_(0)
    return copy


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
