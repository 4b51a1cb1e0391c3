"""The most memory that activations take on a rank, as a formula of lengths, widths and settings.

It may peak at the head or the embedding, or, for each unit of layers, while backward is at the MLP or at the
attention of the unit's last layer. docs/memory.md derives the terms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megazero.config.tree.config import Config
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.recompute import RecomputeConfig
from megazero.layers.recompute import recompute_units
from megazero.models.language_model import LanguageModel
from megazero.ops.linear_cross_entropy import BLOCK, TILE_BYTES
from megazero.plan.job import is_apart
from megazero.plan.words import shown
from megazero.train.parts.families import family_of
from megazero.train.parts.vocabulary import build_vocabulary

_WIDE = 4  # bytes of a float32


@dataclass(frozen=True)
class Heads:
    """The widths of attention, in elements.

    Attributes:
        q, kv: of all queries, and of all keys.
        turned: of queries and keys that are kept beside the projection they are parts of.
    """

    q: int
    kv: int
    turned: int

    @classmethod
    def of(cls, model: ModelConfig) -> Heads:
        """The widths of a model's attention."""
        q, kv = (heads * model.head_dim for heads in (model.num_attention_heads, model.kv_heads))
        # Rotated, both are new. Otherwise queries that lie between keys are copied.
        return cls(q, kv, q + kv if model.rotates else q * (kv < q))


@dataclass(frozen=True)
class Widths:
    """The sizes of a model, in elements.

    Attributes:
        h, f: of hidden states, and within the MLP.
        ups: matrices by which the MLP widens: 2 for SwiGLU.
        heads: of attention.
        tables: rows of the vocabulary, padding included, and of a table of positions; 0 without one.
        size: bytes of an element.
        numbers: bytes of float32 and int64 numbers for each token of a layer, and for each token at all.
    """

    h: int
    f: int
    ups: int
    heads: Heads
    tables: tuple[int, int]
    size: int
    numbers: tuple[int, int]

    @classmethod
    def of(cls, config: Config, vocab: int) -> Widths:
        """The sizes that the configuration describes, for so many ids."""
        model = config.model
        statistics = 2 * (2 if model.normalization == "LayerNorm" else 1) + model.num_attention_heads
        angles = _WIDE * model.rotary_dim if model.rotates else 8  # or the positions
        learned = model.position_embedding_type == "learned_absolute"
        return cls(
            model.hidden_size,
            model.ffn_size,
            2 if model.gated else 1,
            Heads.of(model),
            (vocab, model.positions if learned else 0),
            4 if config.precision.dtype == "fp32" else 2,
            (_WIDE * statistics, angles + 8),
        )

    @property
    def attention(self) -> int:
        """Elements that a layer's attention keeps: its norm, the projection, what is turned, the context."""
        heads = self.heads
        return self.h + (heads.q + 2 * heads.kv) + heads.turned + heads.q

    @property
    def mlp(self) -> int:
        """Elements that a layer's MLP keeps, besides those of a tile: the sum before it, and its norm."""
        return 2 * self.h

    @property
    def inner(self) -> int:
        """Elements within the MLP that backward needs."""
        return (self.ups + 1) * self.f


@dataclass(frozen=True)
class ActivationBytes:
    """The bytes that activations take at the moments at which they may peak; see `activation_bytes`.

    Attributes:
        tokens: those of a rank in a micro-batch, s b / cp.
        moments: bytes by moment.
    """

    tokens: int
    moments: Mapping[str, int]

    @property
    def most(self) -> int:
        """The peak."""
        return max(self.moments.values())

    @property
    def when(self) -> str:
        """The moment of the peak."""
        return max(self.moments, key=self.moments.__getitem__)


def stated(config: Config) -> bool:
    """Whether the formula speaks of such a training: a dense, unsliced GPT of transformer layers, no dropout.

    Latent attention and further tokens are left out too.

    Context parallelism may cut its sequences; what it sends between ranks comes on top.
    """
    model, parallel = config.model, config.parallel
    sliced = parallel.tensor_model_parallel_size > 1 or parallel.pipeline_model_parallel_size > 1
    special = model.fp32_residual_connection or model.apply_residual_connection_post_layernorm
    special |= model.qk_layernorm or model.attention_output_gate or model.norm_position != "input"
    special |= model.attn_logit_softcapping is not None or model.final_logit_softcapping is not None
    special |= model.share_parallel_norm or model.rotary_interleaved
    drops = model.hidden_dropout or model.attention_dropout
    skips = config.skipping.random_ltd or config.skipping.progressive_layer_drop
    built = config.acceleration.compile or config.acceleration.cuda_graph
    made = family_of(model).models.chunk
    decodes = isinstance(made, type) and issubclass(made, LanguageModel) and config.finetune.task is None
    alike = not model.num_experts and model.layer_parts is None
    plain = decodes and alike and config.precision.fp8_format == "none"
    selective = config.recompute.granularity == "selective"
    learns = not config.distillation.kd
    plain = plain and not model.multi_latent_attention and model.mtp_num_layers is None
    return plain and learns and not (sliced or special or drops or skips or built or selective)


def activation_bytes(config: Config, vocab: int, *, apart: bool) -> ActivationBytes:
    """The peak of the activations on a rank, for a training of which the formula is `stated`.

    Args:
        config: the training's configuration.
        vocab: ids, padding included.
        apart: whether the memory of the host is another than the device's.
    """
    assert stated(config), "the formula says nothing of such a training"
    widths, recompute = Widths.of(config, vocab), config.recompute
    length = config.model.seq_length // config.parallel.context_parallel_size
    tokens, away = length * config.batch.micro_batch_size, recompute.offload and apart
    per_layer, per_token = widths.numbers
    layer = widths.attention + widths.mlp + widths.h  # with its input
    tiles = recompute.mlp_tiles or math.ceil(tokens / widths.h)
    layer += widths.inner if tiles == 1 else 0
    # A tied weight's gradient waits for that of the embedding.
    tied = 0 if config.model.untie_embeddings_and_output_weights else vocab * widths.h * widths.size
    moments: dict[str, int] = {}
    kept, fetched = 0, 0  # elements for each token, of the units before
    kept_numbers = 0
    for span, again in recompute_units(config.model.num_layers, recompute):
        alive = kept + fetched + len(span) * layer
        numbers = tokens * (kept_numbers + len(span) * per_layer + per_token) + tied
        for moment, more in _transients(widths, tokens, tiles).items():
            whole = tokens * alive * widths.size + numbers + more
            moments[moment] = max(moments.get(moment, 0), whole)
        kept += len(span) * layer if not again else 0 if away else widths.h
        kept_numbers += 0 if again else len(span) * per_layer
        fetched = widths.h if again and away else 0
    tables = widths.size * widths.h * max(widths.tables)
    moments["embedding"] = widths.size * widths.h * tokens + tables + tied
    kept += 2 * widths.h  # the last layer's result, and its norm
    numbers = tokens * (kept_numbers + per_token + 3 * 8)
    moments["head"] = tokens * kept * widths.size + numbers + _head(widths, tokens, recompute)
    return ActivationBytes(tokens, moments)


def _transients(widths: Widths, tokens: int, tiles: int) -> dict[str, int]:
    """Bytes that backward takes at the last layer of a unit, beyond what is kept for it; less what it let go.

    At the MLP: the gradient of its result, then that of all its inner values. In tiles: also that of its
    input, and sums of the weights' gradients, beside those of a tile.
    """
    h, q, kv, size = widths.h, widths.heads.q, widths.heads.kv, widths.size
    if tiles == 1:
        mlp = size * tokens * (h + widths.ups * widths.f)
        gone = widths.mlp + widths.inner
    else:
        rows, weights = math.ceil(tokens / tiles), widths.inner * h
        at_activation = rows * (widths.inner + widths.ups * widths.f + h) + widths.f * h
        mlp = size * (tokens * 2 * h + max(at_activation, weights + 2 * rows * h)) + _WIDE * weights
        gone = widths.mlp
    attention = size * tokens * (h + q + (q + 2 * kv) - gone) + tokens * widths.numbers[0]
    return {"MLP": mlp, "attention": attention}


def _head(widths: Widths, tokens: int, recompute: RecomputeConfig) -> int:
    """Bytes that the head takes: its logits, of all tokens or of a tile and a block, and gradients."""
    h, (vocab, _), size = widths.h, widths.tables, widths.size
    if not recompute.logits:
        return size * (tokens * (vocab + h) + vocab * h)
    block = min(BLOCK, vocab)
    rows = math.ceil(tokens / recompute.logits_tiles) if recompute.logits_tiles else TILE_BYTES // 4 // block
    rows = min(rows, tokens)
    weight = vocab * h * (size if rows == tokens else _WIDE)
    return size * (tokens * h + rows * (block + h)) + _WIDE * rows * h + weight + size * block * h


def in_words(config: Config) -> str | None:
    """The formula's peak as a line of the report; None where it is not stated."""
    if not stated(config):
        return None
    peak = activation_bytes(config, build_vocabulary(config).padded, apart=is_apart(config))
    return (
        f"by the formula of docs/memory.md, {peak.tokens:,} tokens of a rank take {shown(peak.most)} of "
        f"activations at most, at the {peak.when}"
    )
