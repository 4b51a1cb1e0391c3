"""Split strings such as "969,30,1": which sequences go to training, validation and test.

Two readings of one string exist. Megatron-Core (the default here) rounds the *cumulative* fractions, so split
k is [round(c_k N), round(c_{k+1} N)). Megatron-DeepSpeed rounds each *share*, adds them up and takes the
overshoot off every bound. They differ by at most a few sequences: weights 1,1,1 over 2 sequences give 0,1,1,2
and 0,0,1,2. Both round half to even, as Python does.
"""

from __future__ import annotations

import enum
import math
import re
import warnings
from itertools import pairwise

from megazero.errors import DataError

SPLIT_NAMES = ("train", "valid", "test")


class SplitReading(enum.Enum):
    """The program whose reading of a split string to follow."""

    MEGATRON_CORE = "megatron-core"
    MEGATRON_DEEPSPEED = "megatron-deepspeed"


def parse_split(split: str) -> tuple[float, float, float]:
    """The weights of train, valid and test, normalized to add up to 1; missing ones are 0.

    Numbers are separated by ",", "/" or spaces. Raises DataError for anything else, more than three numbers,
    negative ones or a sum of 0.
    """
    parts = [part for part in re.split(r"[,/\s]+", split.strip()) if part]
    try:
        weights = [float(part) for part in parts]
    except ValueError as error:
        raise DataError(f'`split` must be numbers such as "969,30,1", but is "{split}" ({error}).') from error
    if not 1 <= len(weights) <= len(SPLIT_NAMES):
        raise DataError(f'`split` must have one to three numbers, but has {len(weights)} in "{split}".')
    if any(not math.isfinite(w) or w < 0 for w in weights) or sum(weights) <= 0:
        raise DataError(f'`split` must have weights of at least 0, not all 0, but is "{split}".')
    total = sum(weights)
    train, valid, test = [w / total for w in weights] + [0.0] * (len(SPLIT_NAMES) - len(weights))
    return train, valid, test


def split_ranges(
    split: str, count: int, reading: SplitReading = SplitReading.MEGATRON_CORE
) -> tuple[range, range, range]:
    """The sequence numbers of train, valid and test among `count`; a range may be empty."""
    shares = parse_split(split)
    bounds = [0]
    if reading is SplitReading.MEGATRON_CORE:
        reached = 0.0
        for share in shares:
            reached += share
            bounds.append(round(reached * float(count)))
    else:
        for share in shares:
            bounds.append(bounds[-1] + round(share * float(count)))
        overshoot = bounds[-1] - count
        bounds[1:] = [bound - overshoot for bound in bounds[1:]]
    train, valid, test = (range(begin, max(begin, end)) for begin, end in pairwise(bounds))
    return train, valid, test


def warn_of_empty(split: str, number: int, amount: str, *, given: bool = False) -> None:
    """Warn of an empty split, unless its share is 0 and it was `given` no data of its own.

    `amount` is what was divided, as in "100 sequences".
    """
    if given or split_ranges(split, 1 << 40)[number]:
        how = f"its own data has {amount}" if given else f"split {split} gives it none of the {amount}"
        warnings.warn(f"the {SPLIT_NAMES[number]} split is empty: {how}.", stacklevel=4)
