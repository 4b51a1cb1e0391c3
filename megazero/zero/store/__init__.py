"""Where weights, masters, moments and gradient sums are kept between steps.

`store.py` says what a store does. `device.py` keeps everything on the device. `offload.py` keeps what a
`StatePlacement` names in the host's memory or on disk (ZeRO-Offload, Ren et al. 2021; ZeRO-Infinity,
Rajbhandari et al. 2021): `tier.py` is the contract of such a place, `host.py` and `disk.py` are the two.
`choose.py` picks a store by the configuration.
"""

from megazero.zero.store.choose import store_kind
from megazero.zero.store.device import DeviceStore
from megazero.zero.store.disk import DiskTier
from megazero.zero.store.host import HostTier
from megazero.zero.store.offload import OffloadStore, StatePlacement
from megazero.zero.store.store import (
    GRADIENT,
    HELD,
    WEIGHT,
    LoadedBucket,
    Sizes,
    Store,
    offloaded_bytes,
    traffic,
)
from megazero.zero.store.tier import Tier, TierSlot, Traffic

__all__ = [
    "GRADIENT",
    "HELD",
    "WEIGHT",
    "DeviceStore",
    "DiskTier",
    "HostTier",
    "LoadedBucket",
    "OffloadStore",
    "Sizes",
    "StatePlacement",
    "Store",
    "Tier",
    "TierSlot",
    "Traffic",
    "offloaded_bytes",
    "store_kind",
    "traffic",
]
