"""Models that score texts: decoders with `score` instead of words, such as LlamaForSequenceClassification."""

from __future__ import annotations

import re
from dataclasses import replace

from megazero.checkpoint.naming import TensorRule
from megazero.formats.hf.architecture import Architecture, FieldPair, Json, JsonObject
from megazero.formats.hf.class_names import COUNT, with_count, with_default_names

_WORDS = "head."


def scoring(base: Architecture) -> Architecture:
    """The class that gives a text one score by its last token, without a bias; `base` predicts words."""

    def plain(config: Json) -> JsonObject:
        return dict(base.plain(with_count(config)))

    def complete(config: Json) -> JsonObject:
        return with_default_names(base.complete(config))

    return replace(
        base,
        name=re.sub("(ForCausalLM|LMHeadModel)$", "ForSequenceClassification", base.name),
        auto="AutoModelForSequenceClassification",
        rules=(
            *(rule for rule in base.rules if not rule.ours.startswith(_WORDS)),
            TensorRule("classifier.weight", "n h", "score.weight", "n h"),
        ),
        copies=(),
        settings=(*base.settings, FieldPair(COUNT, "num_classes", 2)),
        ours_fixed=(*base.ours_fixed, ("num_classes", 1), ("classifier_bias", False)),
        plain=plain,
        complete=complete,
        classifies=True,
    )
