"""`store_kind`: the store that a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megazero.config.tree.offload import OffloadConfig
from megazero.mpu.context import ParallelContext
from megazero.mpu.slab import Slab
from megazero.mpu.streams import INLINE
from megazero.zero.policy import ZeroPolicy
from megazero.zero.store.device import DeviceStore
from megazero.zero.store.disk import DiskSettings, DiskTier
from megazero.zero.store.host import HostTier
from megazero.zero.store.meta import MetaTier
from megazero.zero.store.offload import OffloadStore, StatePlacement
from megazero.zero.store.store import Store
from megazero.zero.store.tier import Tier


def store_kind(config: OffloadConfig, context: ParallelContext) -> Callable[[ZeroPolicy], Store]:
    """A function that makes the configured store; places of one kind share a tier.

    On the meta device, tiers only count bytes.

    Args:
        config: what is offloaded, and where to.
        context: has the device of everything else, and its streams.

    Raises:
        OffloadError: no file can be made in the folder to offload to.
    """
    optimizer, gradients, parameters = config.places
    if optimizer == parameters == "none":
        return DeviceStore
    tiers = {name: _tier(name, config, context) for name in dict.fromkeys(config.places)}
    placement = StatePlacement(tiers[optimizer], tiers[gradients], tiers[parameters], config.fraction)
    return lambda policy: OffloadStore(policy, placement, context.streams)


def _tier(name: str, config: OffloadConfig, context: ParallelContext) -> Tier | None:
    if name == "none":
        return None
    if context.device.type == "meta":
        return MetaTier(name)
    slab = Slab(context.streams if config.pin_memory else INLINE)
    if name == "cpu":
        return HostTier(slab)
    assert config.path is not None, "a rule demands a folder for nvme"
    settings = DiskSettings(config.block_size, config.queue_depth, config.direct_io)
    return DiskTier(Path(config.path), settings, slab)
