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
        attention, mixer: what mixes the tokens; at most one of the two.
        cross: attention to what an encoder has made.
        mlp: an MLP, or experts.
        norms: what is normalized: the inputs of the parts, their outputs, or both.
        parallel: whether the MLP reads the input of attention instead of its result.
        one_norm: whether both read one norm then.
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
        """The number of its parts: a layer of attention or a mixer, and an MLP, has two."""
        return (self.attention is not None or self.mixer is not None) + (self.mlp is not None)


@dataclass(frozen=True)
class EmbeddingSpec:
    """The embedding of words, positions and kinds of tokens.

    Attributes:
        factor: of the words' embeddings.
        positions: rows of the table of positions; 0 for none.
        token_types: rows of the table of kinds of tokens; 0 for none.
        norm: of the words' embeddings, before positions are added; None for none.
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
        tied: whether its weight is that of the words' embedding.
        factor: of what the weight is multiplied with.
        softcap: bound c of the logits, which become c tanh(logit / c).
        bias: whether logits have a bias.
        exact_gelu: whether a masked-LM head takes the erf form of GELU.
        binary: whether there is a head for the order of segments.
        classes: classes of a classifier; None for a model that predicts words.
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
    losses: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class RelativeSpec:
    """T5's biases of kinds of distance (Raffel et al. 2020).

    Attributes:
        kinds: how many there are.
        furthest: the distance from which on all keys are of the same kind.
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
        encoder_layers: how many of them are an encoder's; all of one stack.
        further: the layers that predict further tokens (DeepSeek-V3), behind the last one.
        further_weight: weight of the mean of their losses.
        rotary: the tables that turn queries and keys.
        relative: T5's biases; None for none.
        router: the routers' settings, where the model has experts.
        length: tokens of a sequence in training.
        decoder_length: most tokens that a decoder is given.
        positions: longest sequence that the model can be given.
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
        """All layers, those that predict further tokens behind the others."""
        return self.layers + self.further

    def attentions(self) -> Iterator[AttentionSpec | LatentAttentionSpec]:
        """The attention of each layer that has one."""
        return (layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers that have experts, by number from 0, in order; those of further tokens too."""
        return tuple(number for number, layer in enumerate(self.every_layer) if layer.experts)
