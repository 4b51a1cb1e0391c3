"""Parts of the section of the tree about the model: what stands on top of its layers."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt

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


class MultiTokenConfig(AttentionConfig):
    """The prediction of further tokens, in training alone (DeepSeek-V3)"""

    mtp_num_layers: PositiveInt | None = option(
        None,
        "how many tokens beyond the next one each position learns to predict, each by one more layer behind "
        "the last; default: none",
        needs=(
            "family=gpt",
            "position_embedding_type=rope,yarn,alibi,none: further layers read the words alone",
            "embed_layernorm=False: further layers read the words alone",
            "distillation.kd=False",
            "finetune.task=None",
        ),
    )
    mtp_loss_scaling_factor: NonNegativeFloat = option(
        0.1, "weight of the mean of these predictions' losses", needs="mtp_num_layers"
    )

    @property
    def further_layers(self) -> range:
        """The numbers of the layers that predict further tokens, which follow those of the others."""
        return range(self.num_layers, self.num_layers + (self.mtp_num_layers or 0))


class ClassifierConfig(AttentionConfig):
    """The head of a task"""

    needs = "finetune.task"

    num_classes: PositiveInt | None = option(
        None,
        "fine-tuning: classes of the task, or 1 for multiple choice; default: the number of labels",
    )
