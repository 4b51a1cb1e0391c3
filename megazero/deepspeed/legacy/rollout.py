"""Responses that a model in training generates, for reinforcement learning and distillation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megazero.errors import ConfigError, DataError


@dataclass
class RolloutConfig:
    """The engine that generates, which must be ``hybrid_engine``, without CUDA graphs."""

    engine: str = "hybrid_engine"
    use_graph_capture: bool = False


@dataclass
class SamplingConfig:
    """How to sample tokens.

    Attributes:
        max_new_tokens: the number of tokens of each response.
        temperature: 0 takes the most probable token.
        top_p: sample from the most probable tokens that together have this probability.
        top_k: sample from this many tokens; 0 or less for all.
        n_samples_per_prompt: responses to each prompt.
        continuous_batch_size: must be None.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n_samples_per_prompt: int = 1
    continuous_batch_size: int | None = None


@dataclass
class RolloutRequest:
    """Prompts, padded on the left.

    Attributes:
        prompt_ids: int64 [prompts, tokens].
        prompt_attention_mask: int64 [prompts, tokens], 1 for tokens and 0 for padding.

    Raises:
        DataError: the shapes differ.
    """

    prompt_ids: Tensor
    prompt_attention_mask: Tensor

    def __post_init__(self) -> None:
        _must_match("prompt_attention_mask", self.prompt_attention_mask, self.prompt_ids)


@dataclass
class RolloutBatch:
    """Prompts with their responses.

    Attributes:
        input_ids: int64 [responses, tokens], padded on both sides.
        attention_mask: int64 [responses, tokens], 1 for tokens, including the first end-of-text of a
            response.
        response_start_idx: int64 [responses], the position at which each response begins.

    Raises:
        DataError: the shapes differ.
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_start_idx: Tensor

    def __post_init__(self) -> None:
        _must_match("attention_mask", self.attention_mask, self.input_ids)
        _must_match("response_start_idx", self.response_start_idx, self.input_ids[:, 0])

    @property
    def batch_size(self) -> int:
        """The number of responses."""
        return len(self.input_ids)

    @property
    def seq_len(self) -> int:
        """The number of tokens of a prompt and its response."""
        return int(self.input_ids.shape[1])


class RolloutEngine(ABC):
    """Generates responses."""

    name = "base"

    @abstractmethod
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Generate responses to prompts; every rank calls this."""

    @abstractmethod
    def sync_weights(self, step: int) -> None:
        """Load the weights of a training step."""

    def shutdown(self) -> None:  # noqa: B027
        """Release what the engine holds, by default nothing."""


class HybridEngineRollout(RolloutEngine):
    """Generates with the `generate` of the module that an engine trains.

    Args:
        engine: the engine.
        tokenizer: has `eos_token_id` and `pad_token_id`; if the latter is None, the former is used for
            padding.
        cfg: a `RolloutConfig`.

    Raises:
        ConfigError: CUDA graphs or another option of DeepSpeed's decoder are asked for.
    """

    name = "hybrid_engine"

    def __init__(self, engine: Any, tokenizer: Any, cfg: object = None):
        for option in ("use_graph_capture", "use_shared_prefill", "align_decode_fronts"):
            if getattr(cfg, option, False):
                raise ConfigError(f"`{option}` must be off, as the module's own `generate` writes, but is on")
        self.engine, self.tokenizer = engine, tokenizer

    @torch.no_grad()
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Generate responses, those to one prompt in consecutive rows; every rank calls this.

        Every rank generates exactly `max_new_tokens`, because at ZeRO stage 3 all ranks gather weights
        together. Tokens after an end-of-text become padding.

        Raises:
            ConfigError: the tokenizer has no padding, or `continuous_batch_size` is given.
        """
        if sampling.continuous_batch_size is not None:
            raise ConfigError("`continuous_batch_size` must be left out here, but is given; drop it")
        end = self.tokenizer.eos_token_id
        pad = end if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        if pad is None:
            raise ConfigError("`tokenizer` must have `pad_token_id` or `eos_token_id`, but has neither")
        times = sampling.n_samples_per_prompt
        prompts = request.prompt_ids.repeat_interleave(times, 0)
        mask = request.prompt_attention_mask.repeat_interleave(times, 0)
        options: dict[str, float] = {"do_sample": False}
        if sampling.temperature > 0:
            options = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}
            options["top_k"] = max(sampling.top_k, 0)
        ids = self.engine.module.generate(
            prompts,
            attention_mask=mask,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=None,
            pad_token_id=pad,
            **options,
        )
        start = prompts.shape[1]
        ended = torch.zeros_like(ids[:, start:], dtype=torch.bool)
        if end is not None:
            ended[:, 1:] = (ids[:, start:-1] == end).cumsum(1) > 0
        ids = torch.cat([ids[:, :start], ids[:, start:].masked_fill(ended, pad)], 1)
        attention_mask = torch.cat([mask.long(), (~ended).long()], 1)
        return RolloutBatch(ids, attention_mask, torch.full((len(ids),), start, device=ids.device))

    def sync_weights(self, step: int) -> None:
        """Do nothing: the module that is trained generates."""


def build_rollout(
    rollout_cfg: RolloutConfig, student_engine: object = None, tokenizer: object = None, **kwargs: object
) -> RolloutEngine:
    """Return the engine that `rollout_cfg` names.

    Raises:
        ConfigError: it names another, or an argument is missing.
    """
    if rollout_cfg.engine != "hybrid_engine":
        raise ConfigError(f"`rollout_cfg.engine` must be hybrid_engine, but is {rollout_cfg.engine!r}")
    if student_engine is None or tokenizer is None:
        raise ConfigError("`student_engine` and `tokenizer` must be given, but are not; pass both")
    return HybridEngineRollout(student_engine, tokenizer, rollout_cfg)


def _must_match(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.shape != like.shape:
        raise DataError(f"`{name}` must be of shape {list(like.shape)}, but is {list(tensor.shape)}")
