"""Dropout's description: the share, the keys, and the positions of the given rows in the whole."""

from megazero.ops.dropout.masks import (
    AttentionDropout,
    Dropout,
    attention_columns,
    attention_row_keys,
    dropout_mask_attention,
    dropout_mask_hidden,
    hidden_row_keys,
)

__all__ = [
    "AttentionDropout",
    "Dropout",
    "attention_columns",
    "attention_row_keys",
    "dropout_mask_attention",
    "dropout_mask_hidden",
    "hidden_row_keys",
]
