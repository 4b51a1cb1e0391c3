"""DeepSpeed's section `autotuning`: the bounds of a search for layouts."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from megazero.config.deepspeed.load import load_json
from megazero.errors import ConfigError
from megazero.plan.tuning import SIZES, Space

_BOUNDS = ("min_train_micro_batch_size_per_gpu", "max_train_micro_batch_size_per_gpu")
_COUNTS = (*_BOUNDS, "mp_size", "tuner_num_trials", "tuner_early_stopping")
_USED = ("enabled", "results_dir", "overwrite", "metric", *_COUNTS)
_MICRO_BATCH = "train_micro_batch_size_per_gpu"


@dataclass(frozen=True)
class Autotuning:
    """The parts of the section that a search by planning uses.

    Attributes:
        space: micro-batches from the JSON's bounds or list, tensor-parallel ranks from `mp_size`.
        plans: the most layouts to plan, `tuner_num_trials`.
        patience: the plans in a row that are not the best so far, after which to stop,
            `tuner_early_stopping`.
        folder: where results are written, `results_dir`.
        anew: whether to discard earlier results, `overwrite`.
        ignored: keys without effect, such as those about experiments, which this search does not make.
        rest: the JSON without the section, in base64, as `--deepspeed_config` takes it; None without a
            section.
    """

    space: Space = field(default_factory=Space)
    plans: int | None = None
    patience: int | None = None
    folder: str | None = None
    anew: bool = False
    ignored: tuple[str, ...] = ()
    rest: str | None = None

    @classmethod
    def read(cls, path: str) -> Autotuning:
        """Read the section of a DeepSpeed file; all defaults if it is missing or not enabled.

        Raises:
            ConfigError: a value has another type, or the bounds leave no micro-batch.
        """
        document, problems = load_json(path)
        section = document.get("autotuning", {})
        if problems or not isinstance(section, Mapping) or section.get("enabled") is not True:
            return cls()
        wrong = [key for key in _COUNTS if not _is_count(section.get(key, 1))]
        if wrong:
            raise ConfigError(
                [f"`autotuning.{key}` must be a positive integer, but is {section[key]!r}" for key in wrong]
            )
        if section.get("metric", "throughput") not in ("throughput", "latency", "FLOPS_per_gpu", "FLOPS"):
            raise ConfigError(
                "`autotuning.metric` must be throughput, latency or FLOPS_per_gpu, of which each means the "
                f"shortest step here, but is {section['metric']!r}"
            )
        least, most = (
            section.get(key, default) for key, default in zip(_BOUNDS, (1, SIZES[-1]), strict=True)
        )
        sizes = document.get(_MICRO_BATCH, "auto")
        powers = [2**i for i in range(most.bit_length())]
        candidates = sizes if isinstance(sizes, list) else [sizes] if _is_count(sizes) else powers
        if not candidates:
            raise ConfigError(f"`{_MICRO_BATCH}` must be a list of positive integers, but is empty")
        for size in candidates:
            if not _is_count(size):
                raise ConfigError(f"`{_MICRO_BATCH}` must be a list of positive integers, but has {size!r}")
        kept = tuple(size for size in candidates if least <= size <= most)
        if not kept:
            raise ConfigError(
                f"`autotuning.{_BOUNDS[0]}` and `autotuning.{_BOUNDS[1]}` must leave a micro-batch, but "
                f"none of {', '.join(map(str, candidates))} is from {least} to {most}; widen them"
            )
        space = Space(kept, tensor=section.get("mp_size"))
        rest = {key: value for key, value in document.items() if key != "autotuning"}
        if isinstance(sizes, list):
            rest[_MICRO_BATCH] = "auto"
        return cls(
            space,
            section.get("tuner_num_trials"),
            section.get("tuner_early_stopping"),
            section.get("results_dir"),
            section.get("overwrite") is True,
            tuple(key for key in section if key not in _USED),
            base64.b64encode(json.dumps(rest).encode()).decode(),
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
