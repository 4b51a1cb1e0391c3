"""`SparseAttentionUtils`: longer position tables, sparse attention and padding for models of transformers."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.deepspeed.legacy.sparse.attention import TransformersSparseSelfAttention
from megazero.deepspeed.legacy.sparse.configs import SparsityConfig

_BODIES = (("bert", 0), ("roberta", 2))
"""The attribute that holds a model's layers, and the number of reserved first rows in its position table."""


class SparseAttentionUtils:
    """Functions that give a BERT or RoBERTa of transformers longer sequences and sparse attention."""

    @staticmethod
    def extend_position_embedding(model: nn.Module, max_position: int) -> nn.Module:
        """Repeat the position table until it has `max_position` positions; return the model.

        RoBERTa's two reserved rows are kept once.

        Raises:
            ValueError: the model is of another family, or already has `max_position` positions.
        """
        body, first = _body(model)
        embeddings = body.embeddings
        table = embeddings.position_embeddings
        count = len(table.weight) - first
        if max_position <= count:
            raise ValueError(
                f"`max_position` must be above {count}, the length of the table, but is {max_position}; "
                "raise it"
            )
        repeated = torch.arange(max_position, device=table.weight.device) % count
        rows = torch.cat([torch.arange(first, device=repeated.device), first + repeated])
        table.weight.data = table.weight.data[rows].contiguous()
        table.num_embeddings = len(rows)
        for name, device in ((n, b.device) for n, b in embeddings.named_buffers(recurse=False)):
            if name == "position_ids":
                embeddings.position_ids = torch.arange(len(rows), device=device).unsqueeze(0)
            elif name == "token_type_ids":
                embeddings.token_type_ids = torch.zeros(1, len(rows), dtype=torch.long, device=device)
        model.config.max_position_embeddings = len(rows)  # type: ignore[union-attr]
        return model

    @staticmethod
    def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
        """Make the tokenizer truncate texts to `max_position` tokens; return the tokenizer."""
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: nn.Module, max_position: int, sparsity_config: SparsityConfig
    ) -> nn.Module:
        """Replace the attention of all layers by sparse attention with the same weights; return the model.

        Args:
            model: a BERT or RoBERTa of transformers; it must have `max_position` positions.
            max_position: the longest sequence.
            sparsity_config: makes the layouts; the random blocks differ between layers.

        Raises:
            ValueError: the model is of another family, or the layout does not fit the longest sequence.
        """
        body, reserved = _body(model)
        config: Any = model.config
        config.max_position_embeddings = max_position + reserved
        SparseAttentionUtils._replace(config, body.encoder.layer, sparsity_config, max_position)
        return model

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config: Any, layers: Iterable[nn.Module], sparsity_config: SparsityConfig
    ) -> Iterable[nn.Module]:
        """Replace the attention of layers by sparse attention with the same weights; return the layers."""
        SparseAttentionUtils._replace(config, layers, sparsity_config, config.max_position_embeddings)
        return layers

    @staticmethod
    def _replace(config: Any, layers: Iterable[Any], sparsity_config: SparsityConfig, longest: int) -> None:
        longest -= longest % sparsity_config.block  # RoBERTa's table also counts its two reserved rows
        for number, layer in enumerate(layers):
            dense = layer.attention.self
            layer_config = copy(sparsity_config)
            layer_config.layer = number
            sparse = TransformersSparseSelfAttention(config, layer_config, longest)
            sparse.query, sparse.key, sparse.value = dense.query, dense.key, dense.value
            sparse.sparse_self_attention.to(dense.query.weight.device)
            layer.attention.self = sparse.train(dense.training)

    @staticmethod
    def pad_to_block_size(
        block_size: int,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        pad_token_id: int,
        model_embeddings: nn.Module | None,
    ) -> tuple[int, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Pad inputs to a multiple of `block_size`; return the number of added tokens and the inputs.

        Tokens and positions are padded with `pad_token_id`, masks and types with 0.

        Args:
            block_size: the number of tokens in a block.
            input_ids, attention_mask, token_type_ids, position_ids: [b, s], or None.
            inputs_embeds: [b, s, h], or None.
            pad_token_id: the padding token.
            model_embeddings: embeds the added tokens; needed with `inputs_embeds`.

        Raises:
            ValueError: `input_ids` and `inputs_embeds` are both None, or `model_embeddings` is missing.
        """
        inputs = input_ids if input_ids is not None else inputs_embeds
        if inputs is None:
            raise ValueError("`input_ids` must be given, but is None, as is `inputs_embeds`; give one")
        pad = -inputs.shape[1] % block_size
        if pad and inputs_embeds is not None:
            if model_embeddings is None:
                raise ValueError(
                    "`model_embeddings` must be given with `inputs_embeds`, but is None; give it"
                )
            tokens = torch.full((len(inputs), pad), pad_token_id, dtype=torch.long, device=inputs.device)
            inputs_embeds = torch.cat([inputs_embeds, model_embeddings(tokens)], 1)

        def padded(x: Tensor | None, value: int) -> Tensor | None:
            return x if x is None or pad == 0 else F.pad(x, (0, pad), value=value)

        return (
            pad,
            padded(input_ids, pad_token_id),
            padded(attention_mask, 0),
            padded(token_type_ids, 0),
            padded(position_ids, pad_token_id),
            inputs_embeds,
        )

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: Tensor) -> Tensor:
        """Remove the `pad_len` last tokens from an output [b, s, ...]."""
        return sequence_output[:, : sequence_output.shape[1] - pad_len]


def _body(model: nn.Module) -> tuple[Any, int]:
    """Return the body of a model, and the number of its reserved positions."""
    for name, reserved in _BODIES:
        if hasattr(model, name):
            return getattr(model, name), reserved
    raise ValueError(
        f"`model` must have a `bert` or a `roberta`, but is a {type(model).__name__}; use a model with a "
        "head, such as BertForMaskedLM"
    )
