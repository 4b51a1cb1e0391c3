"""`SparseSelfAttention` and `BertSparseSelfAttention`: attention over the blocks of a layout."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from megazero.deepspeed.legacy.sparse.configs import FixedSparsityConfig, SparsityConfig
from megazero.ops.attention import BlockLayout, Pattern, attention

MaskMode = Literal["add", "mul"]
LONGEST = 2048
"""DeepSpeed's default for the longest sequence."""


class SparseSelfAttention(nn.Module):
    """Attention over the blocks of a layout, which is made for the longest sequence and cropped for others.

    With a unidirectional configuration the attention is causal. A query that may attend to no key gives 0.

    Args:
        sparsity_config: makes the layout; None for `FixedSparsityConfig` with four heads.
        key_padding_mask_mode: ``add`` adds `key_padding_mask` to the scores, ``mul`` hides keys where it is
            0.
        attn_mask_mode: the same for `attn_mask`.
        max_seq_length: the longest sequence.

    Attributes:
        master_layout: int64 [heads, N, N], a buffer, so that checkpoints contain it.

    Raises:
        ValueError: the layout does not fit the longest sequence, or a mode is unknown.
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
        layout = config.make_layout(max_seq_length)  # type: ignore[attr-defined]  # of the derived class
        self.register_buffer("master_layout", layout)
        self._cached: tuple[Tensor, int, BlockLayout] | None = None

    def get_layout(self, length: int) -> Tensor:
        """Return the layout for sequences of `length` tokens, int64 [heads, N, N].

        Raises:
            ValueError: the block does not divide the length, or the length is above `max_seq_length`.
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

        The object is cached until the buffer changes, because `attention` caches its tiles by this object.
        """
        master = self.master_layout
        version = 0 if master.is_inference() else master._version
        if self._cached is None or self._cached[0] is not master or self._cached[1] != version:
            self._cached = (master, version, BlockLayout((master != 0).cpu(), self.sparsity_config.block))
        return self._cached[2]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Return softmax(q k^T / sqrt(d) + rpe) v over the layout's blocks, [b, n, s, d].

        Args:
            query, key, value: [b, n, s, d].
            rpe: broadcastable to [b, n, s, s], added to the scores.
            key_padding_mask: [b, s] or [b, 1, 1, s].
            attn_mask: [s, s] or [1, 1, s, s].

        Raises:
            ValueError: the three tensors differ in shape, n is not the configuration's number of heads, or
                see `get_layout`.
        """
        b, heads, s, _ = query.shape
        if not query.shape == key.shape == value.shape or heads != self.sparsity_config.num_heads:
            raise ValueError(
                f"`query`, `key` and `value` must have one shape and {self.sparsity_config.num_heads} heads, "
                f"but are {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}; only "
                "self-attention is sparse"
            )
        bias, visible = rpe, None
        for values, mode, shape in (
            (key_padding_mask, self.key_padding_mask_mode, (b, 1, 1, s)),
            (attn_mask, self.attn_mask_mode, (1, 1, s, s)),
        ):
            if values is None:
                continue
            mask = values.reshape(shape)
            if mode == "add":
                bias = mask if bias is None else bias + mask
            else:
                visible = mask != 0 if visible is None else visible & (mask != 0)
        return self.attend(query, key, value, mask=visible, bias=bias)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """As `forward`, with masks as one `mask` and one `bias`, both broadcastable to [b, n, s, s].

        Args:
            query, key, value: [b, n, s, d].
            mask: bool, True where a query may attend to a key.
            bias: added to the scores.
        """
        length = query.shape[2]
        self.get_layout(length)  # raises if the length does not fit
        context = attention(
            *(x.permute(2, 0, 1, 3) for x in (query, key, value)),
            causal=getattr(self.sparsity_config, "attention", None) == "unidirectional",
            mask=mask,
            bias=None if bias is None else bias.to(query.dtype),
            pattern=Pattern(layout=self._blocks()),
        )
        return context.view(length, len(query), query.shape[1], -1).permute(1, 2, 0, 3)


class BertSparseSelfAttention(nn.Module):
    """BERT's self-attention: projections of query, key and value around a `SparseSelfAttention`.

    Args:
        config: has `hidden_size` and `num_attention_heads`.
        sparsity_config, max_seq_length: see `SparseSelfAttention`.

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
        """Map [b, s, h] to the context [b, s, h]; `attention_mask` [b, s] is added to the scores."""
        context: Tensor = self.sparse_self_attention(
            *self.heads_of(hidden_states), key_padding_mask=attention_mask
        )
        return context.transpose(1, 2).flatten(2)

    def heads_of(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project hidden states [b, s, h] to query, key and value, [b, n, s, d] each."""
        query, key, value = (
            self.transpose_for_scores(linear(hidden_states)) for linear in (self.query, self.key, self.value)
        )
        return query, key, value


class TransformersSparseSelfAttention(BertSparseSelfAttention):
    """`BertSparseSelfAttention` with the arguments and the result of a self-attention of transformers."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **others: object
    ) -> tuple[Tensor, None]:
        """Return the context [b, s, h], and None in the place of the attention probabilities.

        Args:
            hidden_states: [b, s, h].
            attention_mask: broadcastable to [b, n, s, s]; bool (True: visible) or added to the scores.
            others: have no effect, except a cache and encoder states, which are refused.

        Raises:
            ValueError: a cache or encoder states are given.
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
