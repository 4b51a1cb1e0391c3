"""Where weights, masters, moments and gradient sums are kept between steps.

`store.py` says what a store does. `device.py` keeps everything on the device. `offload.py` keeps what a
`StatePlacement` names in the host's memory or on disk (ZeRO-Offload, Ren et al. 2021; ZeRO-Infinity,
Rajbhandari et al. 2021): `tier.py` is the contract of such a place, `host.py` and `disk.py` are the two.
`choose.py` picks a store by the configuration.
"""
