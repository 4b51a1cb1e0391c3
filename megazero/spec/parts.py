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
        out_std: standard deviation for the layers that write to the stream (GPT-2, Radford et al. 2019).
        bias: whether linear layers have biases.
        dropout: dropout rate of the embedding and of each part's output.
        scale: factor of each part's output.
        fp32: whether the stream is kept in fp32.
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
        by_mean: whether it is LayerNorm, which subtracts the mean; else RMSNorm.
        bias: whether it adds a bias.
        eps: added to the variance.
        centred: whether its weight is stored less 1.
        scope: of a norm of queries or keys. ``head``: over the channels of one head, with weights that all
            heads share. ``projection``: over the channels of all heads, of which a tensor-parallel rank has
            its part. None for hidden states.
        decays: whether weight decay applies to its weight and bias.
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
        heads: the number of layouts: one for each query head, or 1 for all.
        seed: seed of the random blocks.
        local: blocks of a window of `fixed`.
        globals_: the number of global blocks, of each window or at the beginning.
        patterns: the number of choices of a window's global blocks.
        horizontal: whether global blocks see all others.
        random: the number of random blocks that each block sees.
        windows: blocks of each window of `variable`.
        starts, ends: first block and end of each run of global blocks; None for runs of one block.
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
    """The keys that a token sees, by position.

    Attributes:
        causal: whether it sees only itself and earlier ones.
        window: the most keys before and after its own; None for all.
        sinks: the number of a document's first tokens that no window hides.
        sparse: the blocks that it sees; None for all blocks.
    """

    causal: bool
    window: Window | None = None
    sinks: int = 0
    sparse: SparseSpec | None = None


@dataclass(frozen=True)
class RotaryScaling:
    """The scaling of rotary positions to sequences longer than those of the first training.

    Attributes:
        kind: linear divides positions; llama3 and yarn slow those channels that turn few times.
        factor: the new sequence length over the original one.
        original: the sequence length of the first training.
        slow, fast: turns in the original length: a channel with fewer than `slow` slows down by the whole
            factor, one with more than `fast` not at all.
        rounded: whether the limits of yarn are rounded to whole channels.
        sharper: yarn's `mscale` and `mscale_all_dim`, by which attention is sharpened.
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
    """A table of cosines and sines by which queries and keys are rotated.

    Attributes:
        channels: channels of a head that are rotated.
        base: base of the frequencies.
        scaling: the scaling of positions; None without one.
        positions: the longest sequence that the model takes.
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
        dropout: dropout rate of the probabilities.
        scale: factor of the products of queries and keys; None for 1 / sqrt(d).
        softcap: bound c of the scores, which become c tanh(score / c).
        softmax: as `--softmax-type`.
        q_norm, k_norm: norms of queries and keys before they are rotated.
        gated: whether the result is multiplied by the sigmoid of a projection of the input.
        rotary: the index of the model's rotary table for queries and keys; None if they are not rotated.
        interleaved: channels of a head that are rotated in neighbouring pairs; None for pairs that are half
            the rotated width apart.
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
    """Multi-latent attention, whose keys and values are made of one small vector of each token (DeepSeek-V2).

    Attributes:
        heads: n.
        query_rank: width of the small vector of queries; None if queries are made of the hidden state.
        rank: width r of the small vector of keys and values.
        plain_dim: channels of a head's queries and keys that are not rotated.
        rotary_dim: channels of a head's queries that are rotated, and of the key that all heads share.
        value_dim: channels of a head's values.
        query_norm, latent_norm: norms of the small vectors.
        sight, dropout, softcap: as in `AttentionSpec`.
        scale: factor of the products of queries and keys.
        rotary: the index of the model's rotary table.
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
        """The number of heads with keys and values of their own: all heads."""
        return self.heads


@dataclass(frozen=True)
class MixerSpec:
    """A Mamba-2 mixer (Dao & Gu 2024).

    Attributes:
        heads: heads of `head_dim` channels each.
        groups: the number of groups of heads that share the input and output maps of the state (B and C).
        state: size of the state of each channel.
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
        """Outputs of its first projection: gates, inputs, the groups' B and C, and step sizes."""
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
