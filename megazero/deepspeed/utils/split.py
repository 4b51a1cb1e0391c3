"""Which layers each stage gets: bounds as DeepSpeed draws them, so that old scripts keep their stages."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import accumulate

from megazero.errors import ConfigError


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """The bounds of `num_parts` parts of equal size; those left over go to the first parts, one each.

    Returns:
        ``num_parts + 1`` bounds: part p holds the items from bound p up to bound p + 1.
    """
    size, left = divmod(num_items, num_parts)
    sizes = [size + (part < left) for part in range(num_parts)]
    return [0, *accumulate(sizes)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """The bounds of contiguous parts whose heaviest and lightest weigh as much the same as possible.

    The parts are found one cut after another, as DeepSpeed does since 0.12.6: the best cut of the first i
    items into j parts extends a best cut of fewer items into j - 1. That is not always the best of all cuts.
    Among equal ones, the last one counts. `megazero.pipeline.partition` makes the heaviest part as light as
    possible instead.
    """
    count = len(weights)
    if count <= num_parts:
        return partition_uniform(count, num_parts)
    total = [0, *accumulate(weights)]
    # For the first i items in j parts: the heaviest part, the lightest, and where the last part begins.
    heaviest = [0.0, *[math.inf] * count]
    lightest = [math.inf, *[-math.inf] * count]
    starts: list[list[int]] = []
    for _ in range(num_parts):
        rows = [(math.inf, math.inf, -math.inf, 0)]
        for stop in range(1, count + 1):
            best = rows[0]
            for start in range(stop):
                load = total[stop] - total[start]
                high, low = max(heaviest[start], load), min(lightest[start], load)
                if high - low <= best[0]:
                    best = (high - low, high, low, start)
            rows.append(best)
        heaviest, lightest = [row[1] for row in rows], [row[2] for row in rows]
        starts.append([row[3] for row in rows])
    bounds = [count]
    for row in reversed(starts):
        bounds.append(row[bounds[-1]])
    return bounds[::-1]


def split_layers(
    method: str, stages: int, types: Sequence[str | None], count_parameters: Callable[[], Sequence[int]]
) -> list[int]:
    """The bounds of the stages.

    Args:
        method: ``uniform``, ``parameters`` (as many trained parameters each) or ``type:REGEX`` (as many
            layers each whose class or function has a name that matches, ignoring case); in any case.
        stages: the number of stages.
        types: the name of each layer's class, or of the function; None if it has none.
        count_parameters: the number of trained parameters of each layer.

    Raises:
        ConfigError: there is no such method, or the regular expression is invalid or matches nothing.
    """
    kind, colon, regex = method.partition(":")
    kind = kind.lower() + colon
    if kind == "uniform":
        return partition_uniform(len(types), stages)
    if kind == "parameters":
        return partition_balanced(count_parameters(), stages)
    if kind == "type:":
        return partition_balanced(_matches(regex, types), stages)
    raise ConfigError(
        f"`partition_method` must be uniform, parameters or type:REGEX, but is {method!r}; choose one of them"
    )


def _matches(regex: str, types: Sequence[str | None]) -> list[int]:
    try:
        pattern = re.compile(regex, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(
            f"`partition_method` must have a regular expression after `type:`, but `{regex}` is not one "
            f"({error}); correct it"
        ) from error
    matches = [int(name is not None and pattern.search(name) is not None) for name in types]
    if not any(matches):
        names = ", ".join(sorted({name for name in types if name is not None}))
        raise ConfigError(
            f"`partition_method` must match the class of some layer, but `{regex}` matches none of: {names}; "
            "correct it"
        )
    return matches
