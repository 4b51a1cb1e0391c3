"""A part of the section of the tree about the model: block-sparse attention, after DeepSpeed's keys."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from megazero.config.tree.option import option
from megazero.config.tree.transformer import TransformerConfig

_SPARSE = "sparse_attention=fixed,variable,bigbird,bslongformer,local_sliding_window"


class SparseAttentionConfig(TransformerConfig):
    """The blocks of keys that a block of queries attends to"""

    needs = _SPARSE

    sparse_attention: Literal[
        "dense", "fixed", "variable", "bigbird", "bslongformer", "local_sliding_window"
    ] = option(
        "dense",
        "the blocks of keys that a block of queries attends to: dense is all, fixed and variable are windows "
        "side by side, the others windows that slide, most with global blocks that all others see",
        needs=(
            "skipping.random_ltd=False: the tokens that a layer keeps are no blocks",
            "data.bert_pack=False: what a sample attends to would depend on where in its row it lies",
        ),
    )
    sparse_block: PositiveInt = option(16, "rows of a block", unit="tokens")
    sparse_direction: Literal["bidirectional", "unidirectional"] | None = option(
        None,
        "refuse a model that attends otherwise: GPT is unidirectional, BERT bidirectional; default: take any",
    )
    sparse_different_layout_per_head: bool = option(
        False,
        "let heads differ: in their random blocks, or in the patterns of `fixed`",
    )
    sparse_num_local_blocks: PositiveInt = option(
        4, "blocks of a window", needs="sparse_attention=fixed", unit="blocks"
    )
    sparse_num_global_blocks: PositiveInt = option(
        1,
        "global blocks: so many of each window with fixed, the first ones with bigbird",
        needs="sparse_attention=fixed,bigbird",
        unit="blocks",
    )
    sparse_num_different_global_patterns: PositiveInt = option(
        1,
        "choices of the global blocks of a window, which heads take in turn",
        needs=("sparse_attention=fixed", "sparse_different_layout_per_head"),
    )
    sparse_horizontal_global_attention: bool = option(
        False,
        "let global blocks also see all others, as they do anyway with bigbird and bslongformer",
        needs=(
            "sparse_attention=fixed,variable",
            "family=bert: no block sees later ones where tokens attend to earlier ones alone",
        ),
    )
    sparse_num_random_blocks: NonNegativeInt = option(
        0,
        "random blocks that each block sees; in GPT they are earlier ones",
        needs="sparse_attention=variable,bigbird",
        unit="blocks",
    )
    sparse_seed: NonNegativeInt = option(
        1234, "seed of the random blocks, which are the same on all ranks and whenever a run goes on"
    )
    sparse_local_window_blocks: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = option(
        (4,),
        "blocks of each window from the beginning on; the last number is repeated",
        needs="sparse_attention=variable",
        unit="blocks",
    )
    sparse_global_block_indices: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = option(
        (0,), "numbers of the global blocks, from 0", needs="sparse_attention=variable,bslongformer"
    )
    sparse_global_block_end_indices: tuple[PositiveInt, ...] = option(
        (),
        "for each of them the block that a run of global blocks ends before; default: runs of one block",
        needs="sparse_attention=variable,bslongformer",
    )
    sparse_num_sliding_window_blocks: PositiveInt = option(
        3,
        "blocks of a window that slides, itself in the middle; an even number counts as the next one",
        needs="sparse_attention=bigbird,bslongformer,local_sliding_window",
        unit="blocks",
    )

    @property
    def is_sparse(self) -> bool:
        """Whether layers attend to some blocks only."""
        return self.sparse_attention != "dense"

    @property
    def sparse_blocks(self) -> int:
        """The number of blocks of the longest sequence that the model can be given."""
        return -(-self.positions // self.sparse_block)


SPARSE_FIELDS = frozenset(SparseAttentionConfig.model_fields) - frozenset(TransformerConfig.model_fields)
"""The settings of block-sparse attention."""
