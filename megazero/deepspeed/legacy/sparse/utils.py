"""`SparseAttentionUtils`: longer positions, sparse attention, padding for models of transformers."""

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
"""The attribute of a model that holds its layers, and the first rows of its table that are no positions."""


class SparseAttentionUtils:
    """Functions that make a BERT or RoBERTa of transformers longer and sparse."""

    @staticmethod
    def extend_position_embedding(model: nn.Module, max_position: int) -> nn.Module:
        """The model, whose position table is repeated until it has `max_position` positions.

        RoBERTa's first two rows stay as they are.

        Raises:
            ValueError: the model is of another family, or has as many positions.
        """
        body, first = _body(model)
        embeddings = body.embeddings
        table = embeddings.position_embeddings
        known = len(table.weight) - first
        if max_position <= known:
            raise ValueError(
                f"`max_position` must be above {known}, but is {max_position}; the table is as long"
            )
        place = torch.arange(max_position, device=table.weight.device) % known
        rows = torch.cat([torch.arange(first, device=place.device), first + place])
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
        """The tokenizer, which now cuts texts at `max_position` tokens."""
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: nn.Module, max_position: int, sparsity_config: SparsityConfig
    ) -> nn.Module:
        """The model, whose layers attend over the blocks of `sparsity_config`, with their own weights.

        Args:
            model: a BERT or RoBERTa of transformers; it must have `max_position` positions.
            max_position: the longest sequence, for which layouts are made.
            sparsity_config: the configuration; each layer draws random blocks of its own.

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
        """The layers, which now attend over the blocks of `sparsity_config`, with their own weights."""
        SparseAttentionUtils._replace(config, layers, sparsity_config, config.max_position_embeddings)
        return layers

    @staticmethod
    def _replace(config: Any, layers: Iterable[Any], sparsity_config: SparsityConfig, longest: int) -> None:
        longest -= longest % sparsity_config.block  # RoBERTa's table has two rows that are no positions
        for number, layer in enumerate(layers):
            before = layer.attention.self
            own = copy(sparsity_config)
            own.layer = number
            sparse = TransformersSparseSelfAttention(config, own, longest)
            sparse.query, sparse.key, sparse.value = before.query, before.key, before.value
            sparse.sparse_self_attention.to(before.query.weight.device)
            layer.attention.self = sparse.train(before.training)

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
        """The number of tokens that are added to each sequence, and the inputs with these.

        Tokens are padded with `pad_token_id`, so are positions; masks and types with 0.

        Args:
            block_size: the length becomes a multiple of this.
            input_ids, attention_mask, token_type_ids, position_ids: [b, s], or None.
            inputs_embeds: [b, s, h], or None.
            pad_token_id: the token.
            model_embeddings: gives the vectors of added tokens where there is `inputs_embeds`.

        Raises:
            ValueError: there are neither tokens nor vectors, or vectors without `model_embeddings`.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise ValueError("`input_ids` must be given, but is None, as is `inputs_embeds`; give one")
        pad = -given.shape[1] % block_size
        if pad and inputs_embeds is not None:
            if model_embeddings is None:
                raise ValueError(
                    "`model_embeddings` must be given with `inputs_embeds`, but is None; give it"
                )
            tokens = torch.full((len(given), pad), pad_token_id, dtype=torch.long, device=given.device)
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
        """The output [b, s, ...] without the tokens that `pad_to_block_size` has added."""
        return sequence_output[:, : sequence_output.shape[1] - pad_len]


def _body(model: Any) -> tuple[Any, int]:
    for name, reserved in _BODIES:
        if hasattr(model, name):
            return getattr(model, name), reserved
    raise ValueError(
        f"`model` must have a `bert` or a `roberta`, but is a {type(model).__name__}; use a model with a "
        "head, such as BertForMaskedLM"
    )
