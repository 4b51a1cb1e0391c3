"""`SparseSelfAttention` and `BertSparseSelfAttention`: attention over the blocks of a configuration."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from megazero.deepspeed.legacy.sparse.configs import FixedSparsityConfig, SparsityConfig
from megazero.ops.attention import BlockLayout, Pattern, attention

MaskMode = Literal["add", "mul"]
LONGEST = 2048
"""The length for which DeepSpeed makes a layout unless told otherwise."""


class SparseSelfAttention(nn.Module):
    """Attention over the blocks of a layout, which is made for the longest sequence and cropped for others.

    With a unidirectional configuration no token attends to a later one. A row that may attend to nothing
    gives zeros.

    Args:
        sparsity_config: the configuration.
        key_padding_mask_mode: whether `key_padding_mask` is added to scores, or hides keys where it is 0.
        attn_mask_mode: the same for `attn_mask`.
        max_seq_length: the longest sequence.

    Attributes:
        master_layout: int64 [heads, N, N], a buffer, so that a checkpoint holds it.

    Raises:
        ValueError: the layout does not fit the longest sequence, or a mode is none.
    """

    master_layout: Tensor

    def __init__(
        self,
        sparsity_config: SparsityConfig | None = None,
        key_padding_mask_mode: MaskMode = "add",
        attn_mask_mode: MaskMode = "mul",
        max_seq_length: int = LONGEST,
    ):
        super().__init__()
        for name, mode in (
            ("key_padding_mask_mode", key_padding_mask_mode),
            ("attn_mask_mode", attn_mask_mode),
        ):
            if mode not in ("add", "mul"):
                raise ValueError(f"`{name}` must be add or mul, but is {mode}; choose one")
        config = FixedSparsityConfig(4) if sparsity_config is None else sparsity_config
        self.sparsity_config = config
        self.key_padding_mask_mode, self.attn_mask_mode = key_padding_mask_mode, attn_mask_mode
        self.max_seq_length = max_seq_length
        self.register_buffer("master_layout", cast(Any, config).make_layout(max_seq_length))
        self._known: tuple[Tensor, int, BlockLayout] | None = None

    def get_layout(self, length: int) -> Tensor:
        """The layout of sequences of `length` tokens, int64 [heads, N, N].

        Raises:
            ValueError: the block does not divide the length, or it is above `max_seq_length`.
        """
        block = self.sparsity_config.block
        if length % block or length > self.max_seq_length:
            raise ValueError(
                f"the sequence must have a multiple of {block} tokens and at most `max_seq_length` "
                f"({self.max_seq_length}), but has {length}; pad it with "
                "`SparseAttentionUtils.pad_to_block_size`, or raise `max_seq_length`"
            )
        blocks = length // block
        return self.master_layout[..., :blocks, :blocks]

    def _blocks(self) -> BlockLayout:
        """The blocks of `master_layout`, on the host.

        They are one object for all calls until the buffer is written: by it the tiles to compute are found.
        """
        master = self.master_layout
        version = 0 if master.is_inference() else master._version
        if self._known is None or self._known[0] is not master or self._known[1] != version:
            self._known = (master, version, BlockLayout((master != 0).cpu(), self.sparsity_config.block))
        return self._known[2]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """softmax(q k^T / sqrt(d) + rpe) v over the layout's blocks, [b, n, s, d].

        Args:
            query, key, value: [b, n, s, d].
            rpe: broadcastable to [b, n, s, s], is added to the scores.
            key_padding_mask: [b, s], or with dims of size one between.
            attn_mask: [s, s], or with dims of size one before.

        Raises:
            ValueError: the three tensors differ in shape, heads are others than the configuration's, or see
                `get_layout`.
        """
        b, heads, s, _ = query.shape
        if not query.shape == key.shape == value.shape or heads != self.sparsity_config.num_heads:
            raise ValueError(
                f"`query`, `key` and `value` must have one shape and {self.sparsity_config.num_heads} heads, "
                f"but are {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}; only "
                "self-attention is sparse"
            )
        added, hidden = rpe, None
        for given, mode, shape in (
            (key_padding_mask, self.key_padding_mask_mode, (b, 1, 1, s)),
            (attn_mask, self.attn_mask_mode, (1, 1, s, s)),
        ):
            if given is None:
                continue
            mask = given.reshape(shape)
            if mode == "add":
                added = mask if added is None else added + mask
            else:
                hidden = mask != 0 if hidden is None else hidden & (mask != 0)
        return self.attend(query, key, value, mask=hidden, bias=added)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """The same with a bool `mask`, True where a query may see a key, and a `bias` of the scores, both
        broadcastable to [b, n, s, s].
        """
        length = query.shape[2]
        self.get_layout(length)  # or refuse the length
        context = attention(
            *(x.permute(2, 0, 1, 3) for x in (query, key, value)),
            causal=getattr(self.sparsity_config, "attention", None) == "unidirectional",
            mask=mask,
            bias=None if bias is None else bias.to(query.dtype),
            pattern=Pattern(layout=self._blocks()),
        )
        return context.view(length, len(query), query.shape[1], -1).permute(1, 2, 0, 3)


class BertSparseSelfAttention(nn.Module):
    """BERT's self-attention with projections of query, key and value, over the blocks of a configuration.

    Args:
        config: has `hidden_size` and `num_attention_heads`.
        sparsity_config: the configuration; None for `FixedSparsityConfig` of four heads.
        max_seq_length: the longest sequence.

    Raises:
        ValueError: the heads do not divide the width, or see `SparseSelfAttention`.
    """

    def __init__(
        self, config: Any, sparsity_config: SparsityConfig | None = None, max_seq_length: int = LONGEST
    ):
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        if width % heads:
            raise ValueError(
                f"`hidden_size` must be a multiple of `num_attention_heads` ({heads}), but is {width}; "
                "change one of them"
            )
        self.num_attention_heads, self.attention_head_size, self.all_head_size = heads, width // heads, width
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.sparse_self_attention = SparseSelfAttention(sparsity_config, max_seq_length=max_seq_length)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, n, s, d]."""
        return x.view(*x.shape[:2], self.num_attention_heads, self.attention_head_size).transpose(1, 2)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The context [b, s, h] of hidden states [b, s, h]; `attention_mask` [b, s] is added to scores."""
        context: Tensor = self.sparse_self_attention(
            *self.heads_of(hidden_states), key_padding_mask=attention_mask
        )
        return context.transpose(1, 2).flatten(2)

    def heads_of(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of hidden states [b, s, h], each [b, n, s, d]."""
        query, key, value = (
            self.transpose_for_scores(linear(hidden_states)) for linear in (self.query, self.key, self.value)
        )
        return query, key, value


class TransformersSparseSelfAttention(BertSparseSelfAttention):
    """The same in the place of a self-attention of transformers, whose masks and results it has."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **others: Any
    ) -> tuple[Tensor, None]:
        """The context, and None for the probabilities, which are never whole.

        Args:
            hidden_states: [b, s, h].
            attention_mask: broadcastable to [b, n, s, s], True where a token may be seen, or added to scores.
            others: a cache and the states of another sequence must be left out; the rest has no effect.

        Raises:
            ValueError: there is a cache or another sequence.
        """
        for name in ("past_key_values", "encoder_hidden_states"):
            if others.get(name) is not None:
                raise ValueError(f"`{name}` must be left out, but is given; only self-attention is sparse")
        mask, bias = attention_mask, None
        if attention_mask is not None and attention_mask.dtype is not torch.bool:
            mask, bias = None, attention_mask
        heads = self.heads_of(hidden_states)
        context = self.sparse_self_attention.attend(*heads, mask=mask, bias=bias)
        return context.transpose(1, 2).flatten(2), None
