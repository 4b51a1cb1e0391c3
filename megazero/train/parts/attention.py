"""The run's attention: whether its shapes vary, and which implementation computes it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megazero.config.tree.config import Config
from megazero.config.tree.curriculum import CurriculumConfig
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.skipping import SkippingConfig
from megazero.ops.attention import ATTENTION, AttentionFacts, BiasKind, MaskKind, head_kind, holds_all_pairs
from megazero.ops.attention.varlen import varlen_knows
from megazero.spec.model import ModelSpec
from megazero.spec.parts import AttentionSpec, LatentAttentionSpec
from megazero.spec.resolve import model_spec
from megazero.train.parts.chunks import DTYPES
from megazero.train.parts.families import FAMILIES


def shapes_vary(curriculum: CurriculumConfig, skipping: SkippingConfig, model: ModelConfig) -> bool:
    """Whether the shapes of micro-batches, or of layers' inputs, vary between steps."""
    return curriculum.seqlen_schedule != "none" or skipping.random_ltd or _padded(model_spec(model))


def _padded(spec: ModelSpec) -> bool:
    """Whether samples are padded; collating then trims columns of padding."""
    return spec.head.classes is not None or not FAMILIES[spec.family].models.causal


def attention_facts(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, *, documents: bool
) -> AttentionFacts | None:
    """The facts of a typical attention call in training; None for a model without attention.

    Args:
        documents: whether rows have several documents that do not attend to each other.
    """
    attentions, family = list(spec.attentions()), FAMILIES[spec.family].models
    if not attentions:
        return None
    windows = [attention.sight for attention in attentions if attention.sight.window is not None]
    mask = MaskKind.CAUSAL if family.causal else MaskKind.NONE
    if windows:
        mask = MaskKind.WINDOW
    # On a CPU each document is a separate call, without a mask between documents.
    if device.type != "cpu" and (documents or _padded(spec)):
        grouped = any(attention.groups != attention.heads for attention in attentions)
        mask = MaskKind.RUNS if varlen_knows(grouped) and not windows else MaskKind.DOCUMENTS
    if family.masks_keys:
        mask = MaskKind.DENSE
    first = attentions[0]
    if first.sight.sparse is not None or any(sight.sinks for sight in windows):
        mask = MaskKind.PATTERN
    return AttentionFacts(
        device.type,
        dtype,
        mask,
        dropout=first.dropout > 0,
        lse=isinstance(first, AttentionSpec) and first.softmax != "vanilla",
        bias=_bias(spec, first),
        heads=head_kind(first.head_dim, first.value_dim),
    )


def _bias(spec: ModelSpec, attention: AttentionSpec | LatentAttentionSpec) -> BiasKind:
    if attention.softcap is not None:
        return BiasKind.SOFTCAP
    if spec.relative is not None:
        return BiasKind.TENSOR
    slopes = isinstance(attention, AttentionSpec) and attention.alibi
    return BiasKind.SLOPES if slopes else BiasKind.NONE


def attention_remarks(config: Config, device: torch.device) -> Iterator[str]:
    """Yield a remark that names the implementation of the run's attention, if the model has attention."""
    dtype, documents = DTYPES[config.precision.dtype], config.data.reset_attention_mask
    facts = attention_facts(model_spec(config.model), dtype, device, documents=documents)
    if facts is None:
        return
    name = ATTENTION.choose(facts, traced=config.acceleration.compile).name
    what = [str(facts.dtype).removeprefix("torch."), facts.mask.value, *["dropout"] * facts.dropout]
    remark = f"attention: {name} on {facts.device} ({', '.join(what)})"
    yield f"{remark}, which holds a tensor of all pairs" if holds_all_pairs(name, facts) else remark
