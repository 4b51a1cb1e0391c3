"""Models of megazero's own in an inference engine."""

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
    """Generation by a model of megazero's, with the arguments of Hugging Face's `generate`."""

    def __init__(self, model: LanguageModel):
        self.model = model

    def check(self, config: DeepSpeedInferenceConfig) -> torch.dtype:
        """The type of the weights, which stays.

        Raises:
            ConfigError: the configuration says another.
        """
        dtype = next(self.model.parameters()).dtype
        if "dtype" in config.model_fields_set and config.dtype != dtype:
            raise ConfigError(
                f"`dtype` must be that of the model ({dtype}), which is built for it, but is {config.dtype}; "
                "leave it out, or build the model in that type"
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
        """Prompts [b, s] and their continuations, [b, s + new]; a sequence that ended is filled with `eos`.

        Args:
            input_ids: prompts, all of one length if they are a tensor.
            max_new_tokens: most tokens to add.
            do_sample: draw tokens; otherwise the likeliest is taken.
            temperature, top_k, top_p, seed: see `Sampling`.
            eos_token_id: the token that ends a sequence.
        """
        prompts = input_ids.tolist() if isinstance(input_ids, Tensor) else [list(p) for p in input_ids]
        sampling = (
            Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
            if do_sample
            else Sampling(greedy=True)
        )
        added = generate(
            self.model, prompts, max_new_tokens=max_new_tokens, sampling=sampling, eod=eos_token_id
        )
        rows = [prompt + more for prompt, more in zip(prompts, added, strict=True)]
        width, end = max(map(len, rows)), eos_token_id or 0
        device = next(self.model.parameters()).device
        return torch.tensor([row + [end] * (width - len(row)) for row in rows], device=device)


def own_model(model: nn.Module) -> OwnModel | None:
    """A model of megazero's that can generate; None for any other module.

    Raises:
        ConfigError: it is sequence-parallel.
    """
    if not isinstance(model, LanguageModel):
        return None
    if model.placement.sequence_parallel:
        raise ConfigError(
            "`sequence_parallel` must be off to generate, but is on; pass "
            "`model.without_sequence_parallelism()`, which has the same weights"
        )
    return OwnModel(model)
