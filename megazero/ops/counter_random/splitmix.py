"""SplitMix64 on int64 tensors (Steele, Lea & Flood 2014): products wrap, shifts are made logical."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.ops.counter_random.reference import MASK_64, mix_64


def signed_64(value: int) -> int:
    """The int64 with the low 64 bits of `value`, for tensors know no unsigned arithmetic."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


GOLDEN_GAMMA = signed_64(0x9E3779B97F4A7C15)
_FIRST = signed_64(0xBF58476D1CE4E5B9)
_SECOND = signed_64(0x94D049BB133111EB)


def _xor_shift_(z: Tensor, bits: int) -> Tensor:
    """z ^= z >> bits, logically: the arithmetic shift's copies of the sign are masked off."""
    return z.bitwise_xor_((z >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def mix_64_(z: Tensor) -> Tensor:
    """SplitMix64's output function, in place on an int64 tensor."""
    _xor_shift_(z, 30).mul_(_FIRST)
    _xor_shift_(z, 27).mul_(_SECOND)
    return _xor_shift_(z, 31)


def derive(key: int | Tensor, index: Tensor) -> Tensor:
    """int64 random bits as a function of (key, index), broadcast: also how to derive keys from keys.

    `key` is an int or an int64 tensor, `index` an int64 tensor. Neighbouring keys share nothing.
    """
    # An int is mixed here: as a tensor it would have to be copied to the device.
    start = signed_64(mix_64(key & MASK_64)) if isinstance(key, int) else mix_64_(key.clone())
    return mix_64_((index + 1) * GOLDEN_GAMMA + start)


def hash_uniform(key: int | Tensor, index: Tensor) -> Tensor:
    """float32 uniform in [0, 1), a function of (key, index) alone; multiples of 2^-24."""
    bits = (derive(key, index) >> 40).bitwise_and_((1 << 24) - 1)
    return bits.to(torch.float32).mul_(2.0**-24)
