"""transformers' BertForPreTraining with SDPA, its own loss, and DDP if there are two ranks."""

from __future__ import annotations

from torch import Tensor, nn

from benchmarks.contenders.bert import BertShape
from benchmarks.contenders.bert.plain import Micro, distributed, make_step


def _loss(model: nn.Module, batch: Micro) -> Tensor:
    return model(
        input_ids=batch.tokens,
        attention_mask=batch.real.long(),
        token_type_ids=batch.types,
        labels=batch.labels,
        next_sentence_label=batch.is_random,
    ).loss


def build(shape: BertShape, rank: int, world_size: int):
    from transformers import BertConfig, BertForPreTraining

    config = BertConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.hidden,
        hidden_dropout_prob=shape.dropout,
        attention_probs_dropout_prob=shape.dropout,
        max_position_embeddings=shape.sequence,
        attn_implementation="sdpa",
    )
    model, no_sync = distributed(BertForPreTraining(config).to(shape.device).train(), world_size)
    return make_step(model, shape, rank, _loss, no_sync)
