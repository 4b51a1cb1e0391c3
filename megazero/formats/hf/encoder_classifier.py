"""transformers' two kinds of BERT with a classifier in the place of the heads of pretraining."""

from __future__ import annotations

from dataclasses import replace

from megazero.checkpoint.naming import TensorRule
from megazero.formats.hf import encoder
from megazero.formats.hf.architecture import Architecture, FieldPair, Limit
from megazero.formats.hf.class_names import COUNT, with_count, with_default_names

_OF_PRETRAINING = ("bert_binary_head", "bert_head_activation")
_LEAST = 2


def sequence_classification(base: Architecture, name: str, body: tuple[TensorRule, ...]) -> Architecture:
    """The class of this name, which sorts sequences, with the layers `body` of `base`."""
    trunk = _classifier(base, name, body)
    return replace(
        trunk,
        auto="AutoModelForSequenceClassification",
        settings=(*trunk.settings, FieldPair(COUNT, "num_classes", _LEAST)),
        fixed=(*trunk.fixed, ("problem_type", "single_label_classification")),
        limits=(
            *trunk.limits,
            Limit(
                lambda m: m.num_classes is None or m.num_classes >= _LEAST,
                "there must be two classes or more, as transformers takes one for regression",
            ),
        ),
        plain=with_count,
        complete=with_default_names,
    )


def multiple_choice(base: Architecture, name: str, body: tuple[TensorRule, ...]) -> Architecture:
    """The class of this name, which scores each choice."""
    trunk = _classifier(base, name, body)
    ours_fixed = (*trunk.ours_fixed, ("num_classes", 1))
    return replace(trunk, auto="AutoModelForMultipleChoice", ours_fixed=ours_fixed)


def _classifier(base: Architecture, name: str, body: tuple[TensorRule, ...]) -> Architecture:
    """`base` without the heads of pretraining, and without their GELU, as the pooler has none."""
    return replace(
        base,
        name=name,
        rules=(*body, *encoder.POOLER, *encoder.CLASSIFIER),
        copies=(),
        blank=encoder.BLANK,
        settings=tuple(setting for setting in base.settings if setting.ours not in _OF_PRETRAINING),
        ours_fixed=tuple((field, value) for field, value in base.ours_fixed if field not in _OF_PRETRAINING),
        limits=encoder.TRUNK_LIMITS,
        classifies=True,
        seen=encoder.types_seen,
    )
