"""DeepSpeed's sparsity configurations, over the layouts of `megazero.ops.block_layouts`.

A layout is [heads, N, N] for N blocks: 1 where queries of a row of blocks attend to keys of a column.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megazero.mpu.rng import derive_key
from megazero.ops.block_layouts import bigbird, bslongformer, dense, fixed, local_sliding_window, variable

_DIRECTIONS = ("unidirectional", "bidirectional")


@dataclass
class SparsityConfig:
    """The settings that all configurations share; derive from it for a custom layout.

    Args:
        num_heads: the number of attention heads.
        block: the number of tokens in a block.
        different_layout_per_head: whether each head has its own layout; otherwise all have the first one's.
        seed, layer: with the head and the row, these determine the random blocks.
    """

    num_heads: int
    block: int = 16
    different_layout_per_head: bool = False
    seed: int = field(default=0, kw_only=True)
    layer: int = field(default=0, kw_only=True)

    @property
    def num_layout_heads(self) -> int:
        """The number of different layouts."""
        return self.num_heads if self.different_layout_per_head else 1

    def setup_layout(self, seq_len: int) -> Tensor:
        """Return an empty layout, int64 [heads, N, N].

        Raises:
            ValueError: the block does not divide the length.
        """
        blocks = self._blocks(seq_len)
        return torch.zeros(self.num_heads, blocks, blocks, dtype=torch.int64)

    def check_and_propagate_first_head_layout(self, layout: Tensor) -> Tensor:
        """Copy the first head's layout to all heads, unless each has its own; return the layout."""
        if not self.different_layout_per_head:
            layout[1:] = layout[0]
        return layout

    def _blocks(self, seq_len: int) -> int:
        if seq_len % self.block:
            raise ValueError(
                f"`seq_len` must be a multiple of the block ({self.block}), but is {seq_len}; pad it with "
                "`SparseAttentionUtils.pad_to_block_size`"
            )
        return seq_len // self.block

    def _key(self) -> int:
        return derive_key(self.seed, "sparse_attention", self.layer)


class _Configured(SparsityConfig):
    """A configuration that makes its layout."""

    def make_layout(self, seq_len: int) -> Tensor:
        """Return the layout for sequences of `seq_len` tokens, int64 [heads, N, N].

        Raises:
            ValueError: the block does not divide the length, or the layout does not fit it.
        """
        layout = self._layout(self._blocks(seq_len))
        return layout.expand(self.num_heads, -1, -1).to(torch.int64, copy=True)

    @abstractmethod
    def _layout(self, blocks: int) -> Tensor:
        """Return the layout of `blocks` blocks, bool [heads or 1, N, N]."""


@dataclass
class DenseSparsityConfig(_Configured):
    """All blocks: dense attention."""

    def _layout(self, blocks: int) -> Tensor:
        return dense(blocks)


@dataclass
class FixedSparsityConfig(_Configured):
    """Adjacent local windows, each with global blocks; see `megazero.ops.block_layouts.fixed`.

    Raises:
        ValueError: the settings contradict each other.
    """

    num_local_blocks: int = 4
    num_global_blocks: int = 1
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1

    def __post_init__(self) -> None:
        _check_direction(self.attention, self.horizontal_global_attention)
        if self.num_local_blocks % self.num_global_blocks:
            raise ValueError(
                f"`num_local_blocks` must be a multiple of `num_global_blocks` ({self.num_global_blocks}), "
                f"but is {self.num_local_blocks}; change one of them"
            )
        patterns, most = self.num_different_global_patterns, self.num_local_blocks // self.num_global_blocks
        if patterns > 1 and not self.different_layout_per_head:
            raise ValueError(
                f"`different_layout_per_head` must be on with `num_different_global_patterns` {patterns}, "
                "but is off; set it"
            )
        if patterns > most:
            raise ValueError(
                f"`num_different_global_patterns` must be at most {most}, but is {patterns}; a window has no "
                "more choices"
            )

    def _layout(self, blocks: int) -> Tensor:
        _check_count("num_global_blocks", self.num_global_blocks, blocks)
        return fixed(
            blocks,
            heads=self.num_layout_heads,
            local=self.num_local_blocks,
            globals_=self.num_global_blocks,
            patterns=self.num_different_global_patterns,
            horizontal=self.horizontal_global_attention,
            causal=_causal(self.attention),
        )


@dataclass
class VariableSparsityConfig(_Configured):
    """Local windows of several widths, global and random blocks; see `megazero.ops.block_layouts.variable`.

    Raises:
        ValueError: the settings contradict each other.
    """

    num_random_blocks: int = 0
    local_window_blocks: Sequence[int] = (4,)
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False

    def __post_init__(self) -> None:
        _check_direction(self.attention, self.horizontal_global_attention)
        _check_runs(self.global_block_indices, self.global_block_end_indices)

    def _layout(self, blocks: int) -> Tensor:
        _check_count("num_random_blocks", self.num_random_blocks, blocks)
        return variable(
            blocks,
            heads=self.num_layout_heads,
            random=self.num_random_blocks,
            windows=self.local_window_blocks,
            starts=self.global_block_indices,
            ends=self.global_block_end_indices,
            horizontal=self.horizontal_global_attention,
            causal=_causal(self.attention),
            key=self._key(),
        )


@dataclass
class BigBirdSparsityConfig(_Configured):
    """A sliding window, global first blocks and random blocks; see `megazero.ops.block_layouts.bigbird`.

    Raises:
        ValueError: `attention` is unknown.
    """

    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    attention: str = "bidirectional"

    def __post_init__(self) -> None:
        _check_direction(self.attention)

    def _layout(self, blocks: int) -> Tensor:
        for name in ("num_random_blocks", "num_sliding_window_blocks", "num_global_blocks"):
            _check_count(name, getattr(self, name), blocks)
        return bigbird(
            blocks,
            heads=self.num_layout_heads,
            random=self.num_random_blocks,
            window=self.num_sliding_window_blocks,
            globals_=self.num_global_blocks,
            causal=_causal(self.attention),
            key=self._key(),
        )


@dataclass
class BSLongformerSparsityConfig(_Configured):
    """A sliding window and global blocks; see `megazero.ops.block_layouts.bslongformer`.

    Raises:
        ValueError: the settings contradict each other.
    """

    num_sliding_window_blocks: int = 3
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"

    def __post_init__(self) -> None:
        _check_direction(self.attention)
        _check_runs(self.global_block_indices, self.global_block_end_indices)

    def _layout(self, blocks: int) -> Tensor:
        _check_count("num_sliding_window_blocks", self.num_sliding_window_blocks, blocks)
        return bslongformer(
            blocks,
            window=self.num_sliding_window_blocks,
            starts=self.global_block_indices,
            ends=self.global_block_end_indices,
            causal=_causal(self.attention),
        )


@dataclass
class LocalSlidingWindowSparsityConfig(_Configured):
    """A sliding window; see `megazero.ops.block_layouts.local_sliding_window`.

    Raises:
        ValueError: `attention` is unknown.
    """

    different_layout_per_head: bool = field(default=False, init=False)
    num_sliding_window_blocks: int = 3
    attention: str = "unidirectional"

    def __post_init__(self) -> None:
        _check_direction(self.attention)

    def _layout(self, blocks: int) -> Tensor:
        _check_count("num_sliding_window_blocks", self.num_sliding_window_blocks, blocks)
        return local_sliding_window(
            blocks, window=self.num_sliding_window_blocks, causal=_causal(self.attention)
        )


def _causal(attention: str) -> bool:
    return attention == "unidirectional"


def _check_direction(attention: str, horizontal: bool = False) -> None:
    if attention not in _DIRECTIONS:
        raise ValueError(f"`attention` must be {' or '.join(_DIRECTIONS)}, but is {attention}; choose one")
    if horizontal and _causal(attention):
        raise ValueError(
            "`attention` must be bidirectional with `horizontal_global_attention`, but is unidirectional; "
            "leave one of them out"
        )


def _check_runs(starts: Sequence[int], ends: Sequence[int] | None) -> None:
    if ends is not None and (
        len(starts) != len(ends) or any(a >= b for a, b in zip(starts, ends, strict=True))
    ):
        raise ValueError(
            f"`global_block_end_indices` must have a number above each of `global_block_indices` "
            f"({list(starts)}), but is {list(ends)}; correct them"
        )


def _check_count(name: str, count: int, blocks: int) -> None:
    if count > blocks:
        raise ValueError(
            f"`{name}` must be at most the number of blocks ({blocks}), but is {count}; lower it, or take "
            "longer sequences"
        )
