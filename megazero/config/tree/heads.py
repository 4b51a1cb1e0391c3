"""Parts of the section of the tree about the model: its output heads."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import NonNegativeFloat, PositiveInt

from megazero.config.condition import config, here
from megazero.config.tree.attention import AttentionConfig
from megazero.config.tree.finetune import Labelled
from megazero.config.tree.option import of_model, of_training
from megazero.config.tree.roles import Role

_OF_BERT = (config.model.family == "bert").because("`pretrain_bert.py` trains one")


class BertConfig(AttentionConfig):
    """BERT's heads and token types"""

    bert_binary_head: bool = of_model(
        True,
        "leave out BERT's second task, which tells whether two segments are in order, and its token types",
        flag="--bert-no-binary-head",
        idle_without=_OF_BERT,
    )
    bert_token_types: bool = of_model(
        False,
        "without the binary head, keep BERT's token types, as transformers' BertForMaskedLM does",
        resolved="has_token_types",
    )
    bert_head_activation: Literal["gelu", "gelu_exact"] = of_model(
        "gelu_exact",
        "nonlinearity of BERT's masked-LM head; gelu is the tanh form, gelu_exact the erf form",
        Role.HEAD,
    )

    @property
    def has_token_types(self) -> bool:
        """Whether a BERT has vectors for the segments of its samples."""
        return self.bert_binary_head or self.bert_token_types


class MultiTokenConfig(AttentionConfig):
    """The prediction of further tokens, in training alone (DeepSeek-V3)"""

    mtp_num_layers: PositiveInt | None = of_model(
        None,
        "how many tokens beyond the next one each position learns to predict, each by one more layer behind "
        "the last; default: none",
        Role.VARIANT | Role.MEGATRON | Role.MEGATRON_CORE,
        needs=(
            here.family == "gpt",
            here.position_embedding_type.among("rope", "yarn", "alibi", "none").because(
                "further layers read the words alone"
            ),
            here.embed_layernorm.is_off.because("further layers read the words alone"),
            config.distillation.kd.is_off,
            config.finetune.task.is_none,
        ),
    )
    mtp_loss_scaling_factor: NonNegativeFloat = of_training(
        0.1, "weight of the mean of these predictions' losses", Role.MEGATRON, needs=here.mtp_num_layers
    )

    @property
    def further_layers(self) -> range:
        """The numbers of the layers that predict further tokens, which follow those of the others."""
        return range(self.num_layers, self.num_layers + (self.mtp_num_layers or 0))


class WordLossConfig(AttentionConfig):
    """The losses of the words that a head predicts"""

    z_loss_coeff: NonNegativeFloat = of_training(
        0.0,
        "weight of the z-loss, the mean of log(Z)^2 of the output logits, which keeps Z near 1; 0.0001 in "
        "PaLM (Chowdhery et al. 2022)",
        needs=(config.finetune.task.is_none | (config.finetune.task == "chat")).because(
            "others train no likelihood of words"
        ),
    )

    @property
    def word_losses(self) -> dict[str, float]:
        """Weights of further losses of each word, by the names of their terms; 0 for none."""
        return {"logit_z": self.z_loss_coeff}


class ClassifierConfig(AttentionConfig):
    """The head of a task"""

    needs = config.finetune.task.among(*get_args(Labelled), "reward")

    num_classes: PositiveInt | None = of_model(
        None,
        "fine-tuning: classes of the task, or 1 for multiple choice; default: the number of labels",
        Role.HEAD,
    )
    classifier_bias: bool = of_model(
        True,
        "leave the bias of a classifier's scores out, as `--task reward` does",
        Role.HEAD | Role.VARIANT,
        flag="--disable-classifier-bias",
    )
