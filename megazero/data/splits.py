"""Split strings such as "969,30,1": which sequences go to training, validation and test.

Two readings of a split string exist. Megatron-Core (the default here) rounds the *cumulative* fractions, so
split k is [round(c_k N), round(c_{k+1} N)). Megatron-DeepSpeed rounds each *fraction*, adds these up and
subtracts the overshoot from every bound. The readings differ by a few sequences at most: for weights 1,1,1
over 2 sequences the bounds are 0,1,1,2 and 0,0,1,2. Both round half to even, as Python does.
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
    """The program whose reading of split strings is followed."""

    MEGATRON_CORE = "megatron-core"
    MEGATRON_DEEPSPEED = "megatron-deepspeed"


def parse_split(split: str) -> tuple[float, float, float]:
    """The weights of train, valid and test, normalized to a sum of 1; a missing weight is 0.

    Numbers are separated by ",", "/" or spaces. Raises DataError for other text, more than three numbers,
    negative numbers or a sum of 0.
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
    """The ranges of train, valid and test among `count` sequences; a range may be empty."""
    fractions = parse_split(split)
    bounds = [0]
    if reading is SplitReading.MEGATRON_CORE:
        reached = 0.0
        for fraction in fractions:
            reached += fraction
            bounds.append(round(reached * float(count)))
    else:
        for fraction in fractions:
            bounds.append(bounds[-1] + round(fraction * float(count)))
        overshoot = bounds[-1] - count
        bounds[1:] = [bound - overshoot for bound in bounds[1:]]
    train, valid, test = (range(begin, max(begin, end)) for begin, end in pairwise(bounds))
    return train, valid, test


def warn_of_empty(split: str, number: int, amount: str, *, has_own_path: bool = False) -> None:
    """Warn that split `number` is empty, unless the split string gives it a weight of 0.

    amount: what was divided, as in "100 sequences". has_own_path: the split has a data path of its own, so
    that the split string does not matter.
    """
    if has_own_path or split_ranges(split, 1 << 40)[number]:
        how = f"its own data has {amount}" if has_own_path else f"split {split} gives it none of the {amount}"
        warnings.warn(f"the {SPLIT_NAMES[number]} split is empty: {how}.", stacklevel=4)
