"""Attention settings of the section `model`: the keys that a query sees, and the softmax over them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from megazero.config.condition import config, here
from megazero.config.tree.option import SkipPattern, is_interval, of_model
from megazero.config.tree.roles import Role
from megazero.config.tree.rotary import RotationConfig

_NOT_BIASED = here.position_embedding_type.among("learned_absolute", "rope", "yarn", "none")

WindowSide = Annotated[int, Field(ge=-1)]
"""The most keys on one side of a query's own; -1 for no limit."""

Window = tuple[WindowSide, WindowSide]
"""The most keys before and after a query's own."""


class AttentionConfig(RotationConfig):
    """The keys that attention sees, and the softmax over them"""

    window_size: Window | None = of_model(None, roles=Role.PLACEMENT)
    """L,R: a token attends to at most L tokens before it and R after it, besides itself; -1 for no limit. W,0
    shows W + 1 tokens, a `sliding_window` of W in transformers one less"""
    window_attn_skip_freq: SkipPattern | None = of_model(None, roles=Role.PLACEMENT, needs=here.window_size)
    """N: every N-th layer has no window (counted from 1: N, 2N, ...); or for each layer a 1, or a 0 for no
    window, such as ([1]*5+[0])*4; default: all layers have it"""
    window_sink_tokens: NonNegativeInt = of_model(
        0,
        unit="tokens",
        needs=(
            here.window_size,
            _NOT_BIASED.because("linear biases hide what is far away"),
            config.skipping.random_ltd.is_off.because("a layer would not see them where they are dropped"),
        ),
    )
    """first tokens of each document that no window hides (StreamingLLM)"""
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = of_model("vanilla", roles=Role.VARIANT)
    """off-by-one: the denominator of attention's softmax has a 1 more, so that a head can attend to nothing;
    learnable: the exponential of a number that each head learns"""
    softmax_scale: PositiveFloat | None = of_model(
        None, roles=Role.VARIANT | Role.MEGATRON | Role.MEGATRON_CORE
    )
    """factor of the products of queries and keys; default: 1 / sqrt(width of a head)"""
    attn_logit_softcapping: PositiveFloat | None = of_model(
        None, roles=Role.VARIANT, needs=_NOT_BIASED.because("linear biases have no bound")
    )
    """bound c of attention's scores, which become c tanh(score / c) before anything is masked (Gemma 2)"""
    qk_layernorm: bool = of_model(
        False, roles=Role.VARIANT | Role.MEGATRON | Role.MEGATRON_CORE | Role.HYBRIDS_IGNORE
    )
    """normalize queries and keys before they are rotated, or latent attention's small vectors"""
    qk_layernorm_scope: Literal["head", "projection"] = of_model("head", needs=here.qk_layernorm)
    """head: each head alone, all with the same weights (Qwen3, Gemma 3); projection: all heads together
    (OLMo-2, OLMoE)"""
    apply_wd_to_qk_layernorm: bool = of_model(False, roles=Role.MEGATRON, needs=here.qk_layernorm)
    """decay weights and biases of these norms too, but not of latent attention's norm for keys and values
    (Qwen3-Next)"""
    attention_output_gate: bool = of_model(False, roles=Role.VARIANT)
    """multiply what attention gives by the sigmoid of a projection of its input (Qwen3-Next)"""

    @property
    def window(self) -> Window | None:
        """The window of the layers that have one; None if it hides nothing."""
        left, right = self.window_size or (-1, -1)
        if self.family == "gpt":  # its tokens see no later ones anyway
            right = -1 if left < 0 else 0
        return None if (left, right) == (-1, -1) else (left, right)

    def window_at(self, layer: int) -> Window | None:
        """The window of a layer (from 0); None if it has none. Layers beyond the last are like it."""
        layer = min(layer, self.num_layers - 1)
        pattern = self.window_attn_skip_freq
        if pattern is None:
            return self.window
        shown = (layer + 1) % pattern[0] > 0 if is_interval(pattern) else pattern[layer] == 1
        return self.window if shown else None

    @property
    def has_windows(self) -> bool:
        """Whether some layer has a window, in constant time."""
        pattern = self.window_attn_skip_freq
        return self.window is not None and (pattern is None or is_interval(pattern) or 1 in pattern)

    @property
    def windows(self) -> tuple[Window | None, ...]:
        """The windows of all layers; ``()`` if there is none."""
        return tuple(map(self.window_at, range(self.num_layers))) if self.has_windows else ()
