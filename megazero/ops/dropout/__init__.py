"""What to drop: the share, the keys, and where in the whole this shard sits."""

from megazero.ops.dropout.masks import (
    Dropout,
    attention_row_keys,
    dropout_mask_attention,
    dropout_mask_hidden,
    hidden_row_keys,
)

__all__ = [
    "Dropout",
    "attention_row_keys",
    "dropout_mask_attention",
    "dropout_mask_hidden",
    "hidden_row_keys",
]
