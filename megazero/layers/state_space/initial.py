"""Initial values of a Mamba-2 mixer's vectors, computed from standard normal numbers (Gu & Dao 2023).

Every parameter is drawn as normal numbers by place and seed; their quantiles are uniform numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megazero.layers.state_space.convolution import WIDTH
from megazero.mpu.param_spec import InitialValues

_SHORTEST, _LONGEST, _FLOOR = 1e-3, 0.1, 1e-4
_SLOWEST, _FASTEST = 1.0, 16.0


def _uniform(x: Tensor, low: float, high: float) -> Tensor:
    quantiles: Tensor = torch.special.ndtr(x)
    return low + (high - low) * quantiles


def taps(x: Tensor) -> Tensor:
    """Uniform within 1 / sqrt(WIDTH) of 0, torch's default for a convolution of so few inputs."""
    return _uniform(x, -1 / math.sqrt(WIDTH), 1 / math.sqrt(WIDTH))


def log_rates(x: Tensor) -> Tensor:
    """Logarithms of numbers that are uniform from 1 to 16."""
    return _uniform(x, _SLOWEST, _FASTEST).log()


def steps(x: Tensor) -> Tensor:
    """Inverse softplus of steps whose logarithms are uniform, from 0.001 to 0.1."""
    dt = _uniform(x, math.log(_SHORTEST), math.log(_LONGEST)).exp().clamp(min=_FLOOR)
    return dt + torch.log(-torch.expm1(-dt))


TAPS, LOG_RATES, STEPS = (InitialValues("normal", 1.0, made) for made in (taps, log_rates, steps))
