"""Optimizers that send a bit per element in place of gradients, and keep what the bits leave out.

`signs.py`: eight signs to a byte. `mean.py`: the mean over replicas with error feedback.
`onebit_adam.py`: 1-bit Adam. `zero_one_adam.py`: 0/1 Adam, whose replicas also skip steps of exchange.
`onebit_lamb.py`: 1-bit LAMB.
"""
