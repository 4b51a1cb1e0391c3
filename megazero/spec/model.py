"""`ModelSpec`: a model as a list of layers between an embedding and a head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megazero.spec.experts import MoeSpec, RouterSpec
from megazero.spec.parts import (
    AttentionSpec,
    LatentAttentionSpec,
    MixerSpec,
    MlpSpec,
    NormSpec,
    RotarySpec,
    StreamSpec,
)


@dataclass(frozen=True)
class LayerSpec:
    """A layer: x + mixer(norm(x)), then x + mlp(norm(x)), or both at once, or one of the two.

    Attributes:
        norm: the norm of hidden states.
        attention, mixer: the part that mixes tokens; at most one of the two.
        cross: attention to an encoder's output.
        mlp: an MLP, or experts.
        norms: what is normalized: the inputs of the parts, their outputs, or both.
        parallel: whether the MLP reads the input of attention instead of its result.
        one_norm: whether attention and MLP share one norm of that input.
        residual_after_norm: whether the residual is taken after the norm.
    """

    stream: StreamSpec
    norm: NormSpec
    attention: AttentionSpec | LatentAttentionSpec | None = None
    mixer: MixerSpec | None = None
    cross: AttentionSpec | None = None
    mlp: MlpSpec | MoeSpec | None = None
    norms: Literal["input", "output", "both"] = "input"
    parallel: bool = False
    one_norm: bool = False
    residual_after_norm: bool = False

    @property
    def experts(self) -> int:
        """Number of experts; 0 without any."""
        return self.mlp.experts if isinstance(self.mlp, MoeSpec) else 0

    @property
    def is_dense(self) -> bool:
        """Whether it has an MLP without experts."""
        return isinstance(self.mlp, MlpSpec)

    @property
    def sides(self) -> int:
        """The number of its parts: 2 with attention or a mixer and an MLP, else 1."""
        return (self.attention is not None or self.mixer is not None) + (self.mlp is not None)


@dataclass(frozen=True)
class EmbeddingSpec:
    """The embedding of words, positions and token types.

    Attributes:
        factor: factor of the words' embeddings.
        positions: rows of the position table; 0 without one.
        token_types: rows of the token-type table; 0 without one.
        norm: norm of the words' embeddings, before positions are added; None without one.
    """

    stream: StreamSpec
    factor: float = 1.0
    positions: int = 0
    token_types: int = 0
    norm: NormSpec | None = None


@dataclass(frozen=True)
class HeadSpec:
    """The output layer of a model, behind its final norm.

    Attributes:
        tied: whether it shares the weight of the words' embedding.
        factor: factor of its input.
        softcap: bound c of the logits, which become c tanh(logit / c).
        bias: whether logits have a bias.
        exact_gelu: whether a masked-LM head takes the erf form of GELU.
        binary: whether there is a head for the order of segments (BERT).
        classes: classes of a classifier; None for a model that predicts words.
        classifier_bias: whether their scores have a bias.
        losses: weights of further losses of its words, by their names in `WORD_LOSSES`.
    """

    stream: StreamSpec
    norm: NormSpec
    tied: bool = True
    factor: float = 1.0
    softcap: float | None = None
    bias: bool = False
    exact_gelu: bool = True
    binary: bool = False
    classes: int | None = None
    classifier_bias: bool = True
    losses: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class RelativeSpec:
    """T5's learned biases by buckets of distance (Raffel et al. 2020).

    Attributes:
        kinds: the number of buckets.
        furthest: the distance from which all keys share a bucket.
    """

    kinds: int
    furthest: int


@dataclass(frozen=True)
class ModelSpec:
    """A model, layer by layer.

    Attributes:
        family: the kind of model.
        stream: the residual stream.
        norm: the norm of hidden states.
        embedding, head: its ends.
        layers: its layers, an encoder's before a decoder's.
        encoder_layers: the number of an encoder's layers; all layers in a model of one stack.
        further: the layers of multi-token prediction (DeepSeek-V3), after the last layer.
        further_weight: weight of the mean of their losses.
        rotary: the rotary tables.
        relative: T5's biases; None without them.
        router: the routers' settings; None without experts.
        length: tokens of a sequence in training.
        decoder_length: the most tokens that a decoder takes.
        positions: the longest sequence that the model takes.
    """

    family: Literal["gpt", "bert", "t5"]
    stream: StreamSpec
    norm: NormSpec
    embedding: EmbeddingSpec
    head: HeadSpec
    layers: tuple[LayerSpec, ...]
    encoder_layers: int
    length: int
    decoder_length: int
    positions: int
    further: tuple[LayerSpec, ...] = ()
    further_weight: float = 0.0
    rotary: tuple[RotarySpec, ...] = ()
    relative: RelativeSpec | None = None
    router: RouterSpec | None = None

    @property
    def every_layer(self) -> tuple[LayerSpec, ...]:
        """All layers, with those of multi-token prediction at the end."""
        return self.layers + self.further

    def attentions(self) -> Iterator[AttentionSpec | LatentAttentionSpec]:
        """The attention of each layer that has one."""
        return (layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The numbers, from 0, of all layers with experts, those of multi-token prediction included."""
        return tuple(number for number, layer in enumerate(self.every_layer) if layer.experts)
