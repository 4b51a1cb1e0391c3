"""`offload_states`, `reload_states`: an engine's state on the host while others use the device."""

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
    """The places that state can be offloaded to."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """The kinds of state that `offload_states` tells apart."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


# The calls to a store that need each kind of state.
_USES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "optim_states": ("stream", "at_rest"),
        "hp_params": ("stream", "at_rest", "open_weights", "adopt"),
        "lp_params": ("shard", "open_weights", "adopt"),
        "lp_grads": ("stream", "sums", "accumulate"),
    }
)


class AwayStates:
    """State of an engine that is in the host's memory until `bring_back`; whatever needs it says so.

    Storages are emptied and later filled again, so that all tensors over them stay what they are.

    Args:
        module: the engine's module.
        parallel: its data parallelism.
        kinds: the kinds to take away, out of those of `OffloadStateTypeEnum`.
        pin: whether to use locked memory.
        non_blocking: whether the host goes on while copies to it are under way.
    """

    def __init__(
        self,
        module: nn.Module,
        parallel: UserParallel,
        kinds: Collection[str],
        *,
        pin: bool,
        non_blocking: bool,
    ):
        self.parallel = parallel
        self.kinds = set(kinds)
        self._copies: list[tuple[torch.UntypedStorage, Tensor]] = []
        parallel.free()
        held = {
            storage.data_ptr(): storage
            for bucket in parallel.store.buckets
            for kind, storage in _storages(parallel, bucket)
            if kind in kinds and storage.nbytes()
        }
        weights = []
        if "lp_params" in kinds:
            weights = [b for b in parallel.store.buckets if _weights(parallel, b).data_ptr() in held]
        else:  # in fp32 the masters are the weights themselves, which forward still reads
            for bucket in parallel.store.buckets:
                held.pop(_weights(parallel, bucket).data_ptr(), None)
        self._hollow = [bucket for bucket in weights if not bucket.layout.row.shard_params]
        for bucket in self._hollow:
            nothing = torch.full((), float("nan"), device=bucket.full.device).to(bucket.key.dtype)
            for param in bucket.params:
                param.data = nothing.expand(param.shape)
        for storage in held.values():
            self._copies.append((storage, _take(storage, pin=pin, non_blocking=non_blocking)))
        self._hook = module.register_forward_pre_hook(self._refuse_forward, prepend=True)
        for name in {name for kind in self.kinds for name in _USES[kind]}:
            setattr(parallel.store, name, self._refuse)

    def bring_back(self, *, non_blocking: bool = False) -> None:
        """Fill the storages again."""
        for storage, copy in self._copies:
            storage.resize_(copy.numel())
            _bytes(storage).copy_(copy, non_blocking=non_blocking)
        for bucket in self._hollow:
            for param, view in zip(bucket.params, bucket.layout.views(bucket.full), strict=True):
                param.data = view
        self._copies, self._hollow = [], []
        self._hook.remove()
        for name in {name for kind in self.kinds for name in _USES[kind]}:
            delattr(self.parallel.store, name)

    @property
    def nbytes(self) -> int:
        """Bytes in the host's memory."""
        return sum(copy.numel() for _, copy in self._copies)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise MegazeroError(
            f"the states of the engine must be on its device, but {', '.join(sorted(self.kinds))} are "
            "offloaded; call `engine.reload_states()` first"
        )

    def _refuse_forward(self, module: nn.Module, args: Any) -> None:
        if "lp_params" in self.kinds:
            self._refuse()


class ZeroMemory:
    """Calls about the memory that ZeRO takes, of an engine and of its optimizer alike.

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
        """Move state to the host's memory until `reload_states`, so that something else can use the device.

        What sleeps on the host or on disk anyway stays there.

        Args:
            include: the kinds to move; None for all. In fp32, `hp_params` are the weights themselves.
            device: ``cpu``; ``none`` does nothing.
            pin_memory: whether to use locked memory, where the device is a CUDA device.
            non_blocking: whether the host goes on while copies are under way.

        Raises:
            ConfigError: there is no such kind or device, or slices of the weights are offloaded by the JSON.
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
                "weights leave the device by themselves"
            )
        if parallel.away is not None:
            kinds |= parallel.away.kinds
            self.reload_states()
        parallel.away = AwayStates(
            parallel.module,
            parallel,
            kinds,
            pin=pin_memory and parallel.store.buckets[0].full.is_cuda,
            non_blocking=non_blocking,
        )

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` has moved; without it, nothing happens."""
        if (away := self._parallel.away) is not None:
            away.bring_back(non_blocking=non_blocking)
            self._parallel.away = None

    def empty_partition_cache(self) -> None:
        """Free the weights that stage 3 has gathered and kept for their next use."""
        self._parallel.free()


def state_devices(model: Any, state: OffloadStateTypeEnum | str) -> set[torch.device]:
    """The devices that a kind of an engine's state is on (DeepSpeed's `get_state_devices`)."""
    (kind,) = _kinds([state])
    away = model.states.parallel.away
    if away is not None and kind in away.kinds:
        return {torch.device("cpu")}
    parallel = model.states.parallel
    return {
        storage.device
        for bucket in parallel.store.buckets
        for held, storage in _storages(parallel, bucket)
        if held == kind
    }


def _kinds(include: Collection[OffloadStateTypeEnum | str] | None) -> set[str]:
    """The kinds to move, by name; sums are where the gradients of DeepSpeed's two kinds are."""
    if isinstance(include, str):
        include = [include]
    wanted = {_known(kind, OffloadStateTypeEnum, "include") for kind in include or OffloadStateTypeEnum}
    return {"lp_grads" if kind == "contiguous_grad_buffer" else kind for kind in wanted}


def _known(value: Any, kinds: type[Enum], name: str) -> str:
    text = str(getattr(value, "value", value))
    known = [kind.value for kind in kinds]
    if text not in known:
        raise ConfigError(f"`{name}` must be one of {', '.join(known)}, but is {text}")
    return text


def _weights(parallel: UserParallel, bucket: Bucket) -> torch.UntypedStorage:
    """The storage of the weights that a rank keeps of a bucket."""
    sharded = bucket.layout.row.shard_params
    return parallel.store.shard(bucket).untyped_storage() if sharded else bucket.storage


def _storages(parallel: UserParallel, bucket: Bucket) -> Iterator[tuple[str, torch.UntypedStorage]]:
    """The kinds of a bucket's state that are on the device, and their storages."""
    store = parallel.store
    yield "lp_params", _weights(parallel, bucket)
    for kind, flat in store.at_rest(bucket).items():
        frozen = kind == WEIGHT and not bucket.key.trainable  # it has no masters
        if not frozen and kind not in store.offloaded.get(bucket, ()):
            yield "hp_params" if kind == WEIGHT else "optim_states", flat.untyped_storage()
    if bucket.key.trainable and not (store.tiers and bucket.layout.row.shard_grads):
        yield "lp_grads", store.sums(bucket).untyped_storage()


def _take(storage: torch.UntypedStorage, *, pin: bool, non_blocking: bool) -> Tensor:
    """A storage's bytes on the host; the storage is emptied."""
    content = _bytes(storage)
    copy = torch.empty(content.numel(), dtype=torch.uint8, pin_memory=pin)
    copy.copy_(content, non_blocking=non_blocking)
    storage.resize_(0)
    return copy


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
