"""The size of a configuration's model, counted on the meta device."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megazero.config.tree.config import Config
from megazero.config.tree.parallel import ParallelConfig
from megazero.config.tree.recompute import RecomputeConfig
from megazero.config.tree.zero import ZeroConfig
from megazero.mpu.context import solo_context
from megazero.mpu.param_spec import ParamSpec, spec_of
from megazero.train.parts.chunks import build_chunks
from megazero.train.parts.families import family_of
from megazero.train.parts.vocabulary import build_vocabulary


@dataclass(frozen=True)
class ModelSize:
    """The size of a model.

    Attributes:
        parameters: elements of all parameters, without padding; a tied parameter counts once.
        active_parameters: the elements that one token uses: of the experts' parameters, those of the experts
            that the token is routed to.
        flops_per_token: FLOPs of training on one token, forward and backward (`account/flops.py`).
    """

    parameters: int
    active_parameters: int
    flops_per_token: float


def size_of(config: Config) -> ModelSize:
    """Count the size of the model that a configuration trains, without allocating the model.

    Raises:
        ConfigError, DataError: the vocabulary is unknown or cannot be read.
    """
    vocabulary = build_vocabulary(config)
    whole = {"parallel": ParallelConfig(), "zero": ZeroConfig(), "recompute": RecomputeConfig()}
    chunks = build_chunks(config.model_copy(update=whole), vocabulary, solo_context())
    specs = [spec_of(parameter) for chunk in chunks.values() for parameter in chunk.parameters()]
    return ModelSize(
        sum(math.prod(spec.shape) for spec in specs),
        sum(used(spec, config.model.moe_router_topk) for spec in specs),
        family_of(config.model).flops_per_token(config, vocabulary),
    )


def used(spec: ParamSpec, experts_per_token: int) -> int:
    """Count a parameter's elements that a token uses if it goes to `experts_per_token` experts."""
    experts = next((spec.shape[cut.dim] for cut in spec.cuts if cut.axis == "ep"), 1)
    return math.prod(spec.shape) // experts * min(experts_per_token, experts)
