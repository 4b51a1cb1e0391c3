"""Inference engines around megazero's own models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megazero.deepspeed.legacy.inference.config import DeepSpeedInferenceConfig
from megazero.errors import ConfigError
from megazero.inference.generate import generate
from megazero.inference.sampling import Sampling
from megazero.models.language_model import LanguageModel


class OwnModel:
    """Generates with one of megazero's models, by the arguments of Hugging Face's `generate`."""

    def __init__(self, model: LanguageModel):
        self.model = model

    def check(self, config: DeepSpeedInferenceConfig) -> torch.dtype:
        """Return the dtype of the weights, which is never converted.

        Raises:
            ConfigError: the configuration asks for another dtype.
        """
        dtype = next(self.model.parameters()).dtype
        if "dtype" in config.model_fields_set and config.dtype != dtype:
            raise ConfigError(
                f"`dtype` must be that of the model ({dtype}), but is {config.dtype}; leave it out, or build "
                "the model in that dtype"
            )
        return dtype

    def generate(
        self,
        input_ids: Tensor | Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 20,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        eos_token_id: int | None = None,
        seed: int = 0,
    ) -> Tensor:
        """Return prompts [b, s] with their continuations, [b, s + new], padded with `eos_token_id` (or 0).

        Args:
            input_ids: the prompts; lists may differ in length.
            max_new_tokens: the most tokens to add.
            do_sample: whether to sample; otherwise the most probable token is taken.
            temperature, top_k, top_p, seed: see `Sampling`.
            eos_token_id: the token that ends a sequence.
        """
        prompts = input_ids.tolist() if isinstance(input_ids, Tensor) else [list(p) for p in input_ids]
        sampling = Sampling(greedy=True)
        if do_sample:
            sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        added = generate(
            self.model, prompts, max_new_tokens=max_new_tokens, sampling=sampling, eod=eos_token_id
        )
        rows = [prompt + more for prompt, more in zip(prompts, added, strict=True)]
        width, end = max(map(len, rows)), eos_token_id or 0
        device = next(self.model.parameters()).device
        return torch.tensor([row + [end] * (width - len(row)) for row in rows], device=device)


def own_model(model: nn.Module) -> OwnModel | None:
    """Wrap a model of megazero's; return None for any other module.

    Raises:
        ConfigError: the model is sequence-parallel.
    """
    if not isinstance(model, LanguageModel):
        return None
    if model.placement.sequence_parallel:
        raise ConfigError(
            "`sequence_parallel` must be off to generate, but is on; pass "
            "`model.without_sequence_parallelism()`, which has the same weights"
        )
    return OwnModel(model)
