"""An engine that trains a model and generates with it between steps (DeepSpeed-Chat's hybrid engine)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megazero.config.deepspeed.table import ROWS
from megazero.deepspeed.engine.engine import DeepSpeedEngine
from megazero.deepspeed.zero.gathered import GatheredParameters
from megazero.errors import ConfigError, DataError

SECTION = "hybrid_engine"
_DEFAULTS: Mapping[str, Any] = MappingProxyType(ROWS[SECTION].upstream.default)


class DeepSpeedHybridEngine(DeepSpeedEngine):
    """A `DeepSpeedEngine` with `generate`, which gathers all weights on every rank while it runs.

    Attributes:
        max_out_tokens: the longest prompt, in tokens; the JSON's `hybrid_engine.max_out_tokens`.
    """

    max_out_tokens: int = _DEFAULTS["max_out_tokens"]

    def generate(self, *inputs: object, **kwargs: object) -> Any:
        """Call the module's `generate` in evaluation mode, without gradients; every rank calls this.

        Raises:
            DataError: a prompt is longer than `max_out_tokens`.
        """
        prompts = kwargs.get("input_ids", inputs[0] if inputs else None)
        if isinstance(prompts, Tensor) and prompts.shape[-1] > self.max_out_tokens:
            raise DataError(
                f"a prompt must have at most `hybrid_engine.max_out_tokens` ({self.max_out_tokens}) "
                f"tokens, but has {prompts.shape[-1]}; give a larger one"
            )
        generate: Any = self.module.generate
        was_training = self.module.training
        self.module.eval()
        try:
            with GatheredParameters(self.module.parameters()), torch.no_grad():
                return generate(*inputs, **kwargs)
        finally:
            self.module.train(was_training)


def engine_kind(section: Mapping[str, Any]) -> type[DeepSpeedEngine]:
    """The class of engine for the JSON's section `hybrid_engine`.

    Raises:
        ConfigError: a key of the section is unknown.
    """
    if unknown := sorted(set(section) - set(_DEFAULTS)):
        raise ConfigError(
            f"`{SECTION}` must have the keys {', '.join(sorted(_DEFAULTS))}, but has {unknown[0]}; "
            "leave it out"
        )
    if not section.get("enabled", False):
        return DeepSpeedEngine
    longest = int(section.get("max_out_tokens", _DEFAULTS["max_out_tokens"]))
    return type("DeepSpeedHybridEngine", (DeepSpeedHybridEngine,), {"max_out_tokens": longest})
