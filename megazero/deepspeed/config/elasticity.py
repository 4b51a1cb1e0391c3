"""`deepspeed.elasticity`: a batch size that divides evenly over many numbers of ranks.

A job may then continue with another number of ranks and the same batches. Releases of DeepSpeed before 0.19
read the section ``elasticity`` of the JSON.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megazero.deepspeed.config import Json
from megazero.errors import ConfigError

CHOSEN = "DEEPSPEED_ELASTICITY_CONFIG"
"""The environment variable with the section by which a job scheduler chose the number of ranks."""
_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_OLDEST = (0, 3, 8)
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23)


class ElasticityError(ConfigError):
    """The section ``elasticity`` cannot be used."""


class ElasticityConfigError(ElasticityError):
    """The section ``elasticity`` lacks a key or has a wrong value."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The number of ranks does not fit the section ``elasticity``."""


@dataclass(frozen=True)
class _ElasticSection:
    """The section ``elasticity``.

    Attributes:
        largest: the largest batch size.
        micro_batches: the micro-batch sizes to choose from.
        least_ranks, most_ranks: the bounds of the number of ranks.
        prefers_larger: whether the largest of equally good sizes is chosen; otherwise the smallest.
        node_ranks: the number of ranks on a node; 0 if any number of ranks is allowed.
        model_ranks: the number of model-parallel ranks.
    """

    largest: int
    micro_batches: tuple[int, ...]
    least_ranks: int
    most_ranks: int
    prefers_larger: bool
    node_ranks: int
    model_ranks: int

    @classmethod
    def of(cls, section: Json) -> _ElasticSection:
        """Read the section.

        Raises:
            ElasticityConfigError: a key is missing or a value is wrong.
        """
        for key in ("max_train_batch_size", "micro_batch_sizes"):
            if key not in section:
                raise ElasticityConfigError(f"`elasticity.{key}` must be given, but is missing; add it")
        micro = section["micro_batch_sizes"]
        counts = {
            key: section.get(key, 1) for key in ("min_gpus", "num_gpus_per_node", "model_parallel_size")
        }
        counts |= {"max_train_batch_size": section["max_train_batch_size"]}
        counts |= {"max_gpus": section.get("max_gpus", 10_000)}
        if not isinstance(micro, list) or not micro:
            raise ElasticityConfigError(
                f"`elasticity.micro_batch_sizes` must be a list of numbers, but is {micro!r}; write one"
            )
        for key, value in [*counts.items(), *(("micro_batch_sizes", size) for size in micro)]:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ElasticityConfigError(
                    f"`elasticity.{key}` must hold whole numbers of at least 1, but has {value!r}; change it"
                )
        version, model = str(section.get("version", 0.2)), counts["model_parallel_size"]
        if version not in ("0.1", "0.2"):
            raise ElasticityConfigError(f"`elasticity.version` must be 0.1 or 0.2, but is {version}")
        if model > 1 and version == "0.1":
            raise ElasticityConfigError(
                f"`elasticity.version` must be 0.2 for a `model_parallel_size` of {model}, but is 0.1"
            )
        if counts["num_gpus_per_node"] % model and version == "0.2":
            raise ElasticityConfigError(
                f"`elasticity.num_gpus_per_node` must be a multiple of `model_parallel_size` ({model}), but "
                f"is {counts['num_gpus_per_node']}; change one of them"
            )
        return cls(
            counts["max_train_batch_size"],
            tuple(micro),
            counts["min_gpus"],
            counts["max_gpus"],
            bool(section.get("prefer_larger_batch", True)),
            counts["num_gpus_per_node"] if version == "0.2" else 0,
            model,
        )

    def solve(self, ranks: int) -> tuple[int, list[int]]:
        """Return the batch size and the numbers of data-parallel ranks for it; `ranks` is 0 if unknown."""
        if not self.node_ranks:
            return self._best(self.largest, self.least_ranks, self.most_ranks)
        nodes, per_node = self.node_ranks, self.node_ranks // self.model_ranks
        batch, fitting = self._best(
            self.largest // per_node, self.least_ranks // nodes, self.most_ranks // nodes
        )
        batch, replicas = batch * per_node, [count * per_node for count in fitting]
        current = ranks // nodes * per_node
        if current in replicas or not current:
            return batch, replicas
        sizes = [self.largest // (size * current) * size * current for size in self.micro_batches]
        if not any(sizes):
            raise self._too_small(self.largest // current)
        return (max if self.prefers_larger else min)(sizes), [current]

    def _best(self, largest: int, least: int, most: int) -> tuple[int, list[int]]:
        """Return the size up to `largest` that fits the most numbers of ranks, and these numbers."""
        bases = {size for size in {*self.micro_batches, math.lcm(*self.micro_batches)} if size <= largest}
        if not bases:
            raise self._too_small(largest)
        sign = 1 if self.prefers_larger else -1
        sizes = {base * _most_divisible(largest // base) for base in bases}
        fitting = {size: self._fitting(size, least, most) for size in sizes}
        best = max(fitting, key=lambda size: (len(fitting[size]), sign * size))
        return best, fitting[best]

    def _fitting(self, size: int, least: int, most: int) -> list[int]:
        """Return the numbers of ranks over which a batch divides into equally many micro-batches."""
        counts = {size // micro for micro in self.micro_batches if size % micro == 0}
        last = min(max(counts, default=0), most)
        return [n for n in range(max(least, 1), last + 1) if any(count % n == 0 for count in counts)]

    def _too_small(self, samples: int) -> ElasticityConfigError:
        return ElasticityConfigError(
            "`elasticity.max_train_batch_size` must hold a micro-batch of each rank, one of "
            f"{list(self.micro_batches)}, but leaves it {samples} samples; raise it"
        )

    def micro_batch(self, batch: int, replicas: int) -> int | None:
        """Return the micro-batch size for `replicas` data-parallel ranks; None if no size fits."""
        sizes = [size for size in self.micro_batches if batch // replicas % size == 0]
        return (max if self.prefers_larger else min)(sizes, default=None)


def _most_divisible(limit: int) -> int:
    """Return the smallest of the numbers up to `limit` with the most divisors."""
    best = (1, -1)
    # A number, its count of divisors, the unused primes, and the largest exponent of the next prime, because
    # exponents do not increase from prime to prime in the result.
    begun: list[tuple[int, int, tuple[int, ...], int]] = [(1, 1, _PRIMES, limit)]
    while begun:
        number, divisors, primes, most = begun.pop()
        best = max(best, (divisors, -number))
        for power in range(1, most + 1 if primes else 1):
            number *= primes[0]
            if number > limit:
                break
            begun.append((number, divisors * (power + 1), primes[1:], power))
    return -best[1]


def compute_elastic_config(
    ds_config: Json,
    target_deepspeed_version: str,
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[int, list[int]] | tuple[int, list[int], int | None]:
    """Return the batch size by the section ``elasticity`` of a JSON.

    Args:
        ds_config: the JSON's content.
        target_deepspeed_version: the release of DeepSpeed, at least 0.3.8.
        world_size: the number of ranks; 0 if it is unknown.
        return_microbatch: whether to return the micro-batch size too; without `world_size`, the environment
            variable WORLD_SIZE is read.

    Returns:
        The batch size, the numbers of ranks that fit it, and, with `world_size` or `return_microbatch`, the
        micro-batch size.

    Raises:
        ElasticityError: the section is missing, off or wrong.
        ElasticityIncompatibleWorldSize: the number of ranks does not fit.
    """
    if not elasticity_enabled(ds_config):
        raise ElasticityError("`elasticity.enabled` must be true, but is not; enable the section")
    release = tuple(map(int, re.findall(r"\d+", target_deepspeed_version)[:3]))
    if release < _OLDEST:
        raise ElasticityError(
            f"`target_deepspeed_version` must be 0.3.8 or later, but is {target_deepspeed_version}"
        )
    section = _ElasticSection.of(ds_config["elasticity"])
    ranks = world_size
    if not ranks and (section.node_ranks or return_microbatch):
        ranks = int(os.environ.get("WORLD_SIZE") or 0)
    if return_microbatch and not ranks:
        raise ElasticityConfigError(
            "`world_size` must be given for a micro-batch, here or as WORLD_SIZE, but is not; pass it"
        )
    batch, fitting = section.solve(ranks)
    if not (world_size or return_microbatch):
        return batch, fitting
    replicas = ranks // section.model_ranks
    if replicas not in fitting:
        raise ElasticityIncompatibleWorldSize(
            f"`world_size` must give a number of replicas that fits a batch of {batch}, one of {fitting}, "
            f"but gives {replicas}; start another number of ranks"
        )
    return batch, fitting, section.micro_batch(batch, replicas)


def elasticity_enabled(ds_config: Json) -> bool:
    """Whether a JSON has an enabled section ``elasticity``."""
    section = ds_config.get("elasticity")
    return isinstance(section, Mapping) and bool(section.get("enabled", False))


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Json) -> None:
    """Check a section against the one in the environment variable `DEEPSPEED_ELASTICITY_CONFIG`, if set.

    Raises:
        ElasticityConfigError: they disagree on a key that decides the batch size.
    """
    if CHOSEN not in os.environ:
        return
    try:
        chosen = json.loads(os.environ[CHOSEN])
        chosen = chosen.get("elasticity", chosen)
    except (ValueError, AttributeError) as error:
        raise ElasticityConfigError(f"{CHOSEN} must hold a JSON's section, but does not: {error}") from error
    for key in ("max_train_batch_size", "micro_batch_sizes", "version"):
        if runtime_elastic_config_dict.get(key) != chosen.get(key):
            raise ElasticityConfigError(
                f"`elasticity.{key}` must be what {CHOSEN} says ({chosen.get(key)}), but is "
                f"{runtime_elastic_config_dict.get(key)}; start the job with one JSON"
            )


def with_elastic_batches(content: Json, ranks: int, version: str) -> Json:
    """Replace the section ``elasticity`` of a JSON, if enabled, by the batch sizes that follow from it.

    Args:
        content: the JSON's content.
        ranks: the number of data-parallel ranks.
        version: the release of DeepSpeed.

    Raises:
        ElasticityError: the section is wrong, or the JSON has batch sizes of its own.
    """
    if not elasticity_enabled(content):
        return content
    section: Json = content["elasticity"]
    ensure_immutable_elastic_config(section)
    own = [key for key in _BATCHES if key in content]
    if own and not section.get("ignore_non_elastic_batch_info", False):
        raise ElasticityConfigError(
            f"`{own[0]}` must be left out with `elasticity`, which decides it, but is {content[own[0]]}; "
            "leave it out, or set `elasticity.ignore_non_elastic_batch_info`"
        )
    world = ranks * int(section.get("model_parallel_size", 1))
    batch, *_, micro = compute_elastic_config(content, version, world, return_microbatch=True)
    sizes = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": micro}
    return {k: v for k, v in content.items() if k not in (*_BATCHES, "elasticity")} | sizes
