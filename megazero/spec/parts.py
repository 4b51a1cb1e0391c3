"""The parts of a layer: norms, attention, state-space mixers and MLPs, as plain frozen values.

h is the width of the residual stream; n are query heads, g groups of them that share a key and a value, and d
the channels of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Window = tuple[int, int]
"""The most keys before and after a query's own; -1 for no limit."""


@dataclass(frozen=True)
class StreamSpec:
    """The residual stream, which every part reads and writes.

    Attributes:
        width: h.
        std: standard deviation of initial weights.
        out_std: that of the layers that write to the stream (GPT-2, Radford et al. 2019).
        bias: whether linear layers have biases.
        dropout: share of what a part adds to the stream, and of the embedding, that is dropped.
        scale: factor of what a part adds to it.
        fp32: whether it is kept in fp32.
    """

    width: int
    std: float
    out_std: float
    bias: bool = True
    dropout: float = 0.0
    scale: float = 1.0
    fp32: bool = False


@dataclass(frozen=True)
class NormSpec:
    """A norm of [..., features].

    Attributes:
        features: the number of channels that are normalized together.
        by_mean: whether it is layer norm, which takes the mean off; else RMSNorm.
        bias: whether it adds a bias.
        eps: added to the variance.
        centred: whether its weight is stored less 1.
        scope: for queries and keys, of which each tensor-parallel rank has some heads. ``head``: features are
            the channels of one head, and all heads share the weights. ``projection``: they are those of all
            heads, and a rank has its part of them. None for hidden states.
        decays: whether its weight and bias decay.
    """

    features: int
    by_mean: bool
    bias: bool
    eps: float
    centred: bool = False
    scope: Literal["head", "projection"] | None = None
    decays: bool = False


@dataclass(frozen=True)
class SparseSpec:
    """The blocks of keys that a block of queries attends to, in a longest sequence of `blocks` blocks.

    Attributes:
        kind: how they are chosen, by DeepSpeed's names.
        block: tokens of a block.
        blocks: blocks of the longest sequence.
        heads: layouts: one for each query head, or 1 for all.
        seed: of the random blocks.
        local: blocks of a window of `fixed`.
        globals_: global blocks of each window, or the first ones.
        patterns: choices of the global blocks of a window.
        horizontal: whether global blocks see all others.
        random: random blocks that each block sees.
        windows: blocks of each window of `variable`.
        starts, ends: runs of global blocks; no ends for runs of one block.
        sliding: blocks of a window that slides.
    """

    kind: str
    block: int
    blocks: int
    heads: int
    seed: int
    local: int
    globals_: int
    patterns: int
    horizontal: bool
    random: int
    windows: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...] | None
    sliding: int


@dataclass(frozen=True)
class SightSpec:
    """The keys that a token sees by their places.

    Attributes:
        causal: whether it sees only itself and earlier ones.
        window: the most keys before and after its own; None for all.
        sinks: first tokens of a document that no window hides.
        sparse: the blocks that it sees; None for all.
    """

    causal: bool
    window: Window | None = None
    sinks: int = 0
    sparse: SparseSpec | None = None


@dataclass(frozen=True)
class RotaryScaling:
    """How slow channels are slowed down further, for sequences longer than those of the first training.

    Attributes:
        kind: linear divides positions; llama3 and yarn slow those channels that turn few times.
        factor: by how much.
        original: the length of the first training.
        slow, fast: turns in that length below which a channel slows down by all, and above which by nothing.
        rounded: whether the limits of yarn fall on channels.
        sharper: yarn's two factors of the logarithm by which attention is sharper, of queries and keys, and
            of all channels.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original: int = 0
    slow: float = 0.0
    fast: float = 0.0
    rounded: bool = True
    sharper: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class RotarySpec:
    """A table of cosines and sines by which queries and keys are turned.

    Attributes:
        channels: channels of a head that are rotated.
        base: base of the frequencies.
        scaling: None for channels that keep their speed.
        positions: the longest sequence that the model can be given.
    """

    channels: int
    base: float
    scaling: RotaryScaling | None
    positions: int


@dataclass(frozen=True)
class AttentionSpec:
    """Attention with a key and a value for each group of query heads.

    Attributes:
        heads, groups: n and g.
        head_dim: d.
        sight: the keys that a token sees.
        qkv_bias: whether queries, keys and values have biases.
        dropout: share of the probabilities that is dropped.
        scale: factor of the products of queries and keys; None for 1 / sqrt(d).
        softcap: bound c of the scores, which become c tanh(score / c).
        softmax: as `--softmax-type`.
        q_norm, k_norm: norms of queries and keys before they are rotated.
        gated: whether the result is multiplied by the sigmoid of a projection of the input.
        rotary: the number of the model's rotary table that turns queries and keys; None: they are not turned.
        interleaved: channels of a head whose neighbours turn together; None: those half a rotation apart do.
        alibi: whether scores have biases that are linear in the distance.
    """

    stream: StreamSpec
    heads: int
    groups: int
    head_dim: int
    sight: SightSpec
    qkv_bias: bool = True
    dropout: float = 0.0
    scale: float | None = None
    softcap: float | None = None
    softmax: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    q_norm: NormSpec | None = None
    k_norm: NormSpec | None = None
    gated: bool = False
    rotary: int | None = None
    interleaved: int | None = None
    alibi: bool = False

    @property
    def value_dim(self) -> int:
        """Channels of a head's values."""
        return self.head_dim


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Attention whose keys and values are made of one small vector of each token (DeepSeek-V2).

    Attributes:
        heads: n.
        query_rank: width of the small vector of queries; None: they are made of the token's own.
        rank: width r of the small vector of keys and values.
        plain_dim: channels of a head's queries and keys that are not rotated.
        rotary_dim: channels of its queries that are rotated, and of the key that all heads share.
        value_dim: channels of a head's values.
        query_norm, latent_norm: norms of the small vectors.
        sight, dropout, softcap: as in `AttentionSpec`.
        scale: factor of the products of queries and keys.
        rotary: the number of the model's rotary table.
    """

    stream: StreamSpec
    heads: int
    query_rank: int | None
    rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    sight: SightSpec
    scale: float
    query_norm: NormSpec | None = None
    latent_norm: NormSpec | None = None
    dropout: float = 0.0
    softcap: float | None = None
    rotary: int | None = 0

    @property
    def head_dim(self) -> int:
        """Channels of the queries and keys of one head."""
        return self.plain_dim + self.rotary_dim

    @property
    def groups(self) -> int:
        """Heads with keys and values of their own: all."""
        return self.heads


@dataclass(frozen=True)
class MixerSpec:
    """A Mamba-2 mixer (Dao & Gu 2024).

    Attributes:
        heads: heads of `head_dim` channels each.
        groups: groups of heads that share what is written and read.
        state: numbers in the state of each channel.
        min_step: the shortest step of a head.
        eps: added to the variance by its norm.
    """

    stream: StreamSpec
    heads: int
    head_dim: int
    groups: int
    state: int
    min_step: float
    eps: float

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def rows(self) -> int:
        """Outputs of its first projection: gates, inputs, what groups write and read by, and steps."""
        return 2 * (self.width + self.groups * self.state) + self.heads


@dataclass(frozen=True)
class ActivationSpec:
    """The nonlinearity of an MLP.

    Attributes:
        name: as `--activation`.
        offset: added to the values that are gated.
        clamp: bounds gates from above, and gated values from both sides.
    """

    name: str
    offset: float = 0.0
    clamp: float | None = None

    @property
    def gated(self) -> bool:
        """Whether half of the inner values gate the other half."""
        return self.name in ("swiglu", "geglu", "quick_geglu")


@dataclass(frozen=True)
class MlpSpec:
    """An MLP of inner width `width` (of each of the two halves, if one gates the other)."""

    stream: StreamSpec
    width: int
    activation: ActivationSpec

    @property
    def inner(self) -> tuple[int, ...]:
        """Shape of the outputs of its first product."""
        return (2, self.width) if self.activation.gated else (self.width,)
