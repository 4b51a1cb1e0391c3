"""Parts of the section of the tree about the model: what stands on top of its layers."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from megazero.config.tree.attention import AttentionConfig
from megazero.config.tree.option import option


class BertConfig(AttentionConfig):
    """BERT's heads and token types"""

    bert_binary_head: bool = option(
        True,
        "leave out BERT's second task, which tells whether two segments are in order, and its token types",
        flag="--bert-no-binary-head",
    )
    bert_token_types: bool = option(
        False, "without the binary head, keep BERT's token types, as transformers' BertForMaskedLM does"
    )
    bert_head_activation: Literal["gelu", "gelu_exact"] = option(
        "gelu_exact", "nonlinearity of BERT's masked-LM head; gelu is the tanh form, gelu_exact the erf form"
    )

    @property
    def has_token_types(self) -> bool:
        """Whether a BERT has vectors for the segments of its samples."""
        return self.bert_binary_head or self.bert_token_types


class ClassifierConfig(AttentionConfig):
    """The head of a task"""

    needs = "finetune.task"

    num_classes: PositiveInt | None = option(
        None,
        "fine-tuning: classes of the task, or 1 for multiple choice; default: the number of labels",
    )
