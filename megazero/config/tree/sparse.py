"""Block-sparse attention in the section `model`, with the names of DeepSpeed's keys."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from megazero.config.condition import config, here
from megazero.config.tree.option import of_model
from megazero.config.tree.roles import Role
from megazero.config.tree.transformer import TransformerConfig

_SPARSE = here.sparse_attention.among("fixed", "variable", "bigbird", "bslongformer", "local_sliding_window")


class SparseAttentionConfig(TransformerConfig):
    """The blocks of keys that a block of queries attends to"""

    needs = _SPARSE

    sparse_attention: Literal[
        "dense", "fixed", "variable", "bigbird", "bslongformer", "local_sliding_window"
    ] = of_model(
        "dense",
        roles=Role.VARIANT,
        needs=(
            config.skipping.random_ltd.is_off.because("the tokens that a layer keeps are no blocks"),
            config.data.bert_pack.is_off.because(
                "what a sample attends to would depend on where in its row it lies"
            ),
        ),
    )
    """the blocks of keys that a block of queries attends to: dense is all, fixed and variable are windows
    side by side, the others windows that slide, most with global blocks that all others see"""
    sparse_block: PositiveInt = of_model(16, unit="tokens")
    """rows of a block"""
    sparse_direction: Literal["bidirectional", "unidirectional"] | None = of_model(None)
    """refuse a model that attends otherwise: GPT is unidirectional, BERT bidirectional; default: take any"""
    sparse_different_layout_per_head: bool = of_model(False)
    """let heads differ: in their random blocks, or in the patterns of `fixed`"""
    sparse_num_local_blocks: PositiveInt = of_model(4, needs=here.sparse_attention == "fixed", unit="blocks")
    """blocks of a window"""
    sparse_num_global_blocks: PositiveInt = of_model(
        1, needs=here.sparse_attention.among("fixed", "bigbird"), unit="blocks"
    )
    """global blocks: so many of each window with fixed, the first ones with bigbird"""
    sparse_num_different_global_patterns: PositiveInt = of_model(
        1, needs=(here.sparse_attention == "fixed", here.sparse_different_layout_per_head)
    )
    """choices of the global blocks of a window, which heads take in turn"""
    sparse_horizontal_global_attention: bool = of_model(
        False,
        needs=(
            here.sparse_attention.among("fixed", "variable"),
            (here.family == "bert").because(
                "no block sees later ones where tokens attend to earlier ones alone"
            ),
        ),
    )
    """let global blocks also see all others, as they do anyway with bigbird and bslongformer"""
    sparse_num_random_blocks: NonNegativeInt = of_model(
        0, needs=here.sparse_attention.among("variable", "bigbird"), unit="blocks"
    )
    """random blocks that each block sees; in GPT they are earlier ones"""
    sparse_seed: NonNegativeInt = of_model(1234)
    """seed of the random blocks, which are the same on all ranks and whenever a run goes on"""
    sparse_local_window_blocks: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = of_model(
        (4,), needs=here.sparse_attention == "variable", unit="blocks"
    )
    """blocks of each window from the beginning on; the last number is repeated"""
    sparse_global_block_indices: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = of_model(
        (0,), needs=here.sparse_attention.among("variable", "bslongformer")
    )
    """numbers of the global blocks, from 0"""
    sparse_global_block_end_indices: tuple[PositiveInt, ...] = of_model(
        (), needs=here.sparse_attention.among("variable", "bslongformer")
    )
    """for each of them the block that a run of global blocks ends before; default: runs of one block"""
    sparse_num_sliding_window_blocks: PositiveInt = of_model(
        3, needs=here.sparse_attention.among("bigbird", "bslongformer", "local_sliding_window"), unit="blocks"
    )
    """blocks of a window that slides, itself in the middle; an even number counts as the next one"""

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
