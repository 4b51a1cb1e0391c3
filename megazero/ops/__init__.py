"""Operators: the fused pieces of a transformer, each with a plain reference that defines it.

There is one file per operator. Its reference reads like the formula, and autograd through it gives the true
gradients; its table holds the implementations that the public function chooses from (see `dispatch.py`); its
examples say on which calls they are compared. tests/ops/test_sweep.py compares every row of every table with
its reference, forward and backward, on ragged sizes and extreme values.

Activations are [s, b, h], sequence first. Randomness is counter-based (`counter_random`, `dropout`): a
function of keys and absolute positions, so that every layout sees the same numbers.

`operators()` lists all tables; `dispatch.explain(operator)` says which implementation runs where.
"""

from typing import Any

from megazero.ops.attention import ATTENTION
from megazero.ops.bias_dropout_add import BIAS_DROPOUT_ADD
from megazero.ops.bias_gelu import BIAS_GELU
from megazero.ops.chosen_rows import CHOSEN_ROWS
from megazero.ops.coded_linear import CODED_LINEAR
from megazero.ops.cross_entropy import CROSS_ENTROPY
from megazero.ops.dispatch import Operator
from megazero.ops.embedding import EMBEDDING
from megazero.ops.gate import GATE
from megazero.ops.gated import GATED
from megazero.ops.gathered_sum import GATHERED_SUM
from megazero.ops.gradient_sum import GRADIENT_SUM
from megazero.ops.grouped_linear import GROUPED_LINEAR, GROUPED_OUTER
from megazero.ops.kept_columns import KEPT_COLUMNS
from megazero.ops.kl_divergence import KL_DIVERGENCE
from megazero.ops.lamb import LAMB_MOVE, LAMB_NORMS
from megazero.ops.layer_norm import ADD_LAYER_NORM, LAYER_NORM
from megazero.ops.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from megazero.ops.permute import PERMUTE
from megazero.ops.quantize import DEQUANTIZE, QUANTIZE
from megazero.ops.rms_norm import ADD_RMS_NORM, RMS_NORM
from megazero.ops.rotary import ROTARY
from megazero.ops.scaled_softmax import SCALED_SOFTMAX
from megazero.ops.sort_by_expert import SORT_BY_EXPERT
from megazero.ops.square_sum import SQUARE_SUM
from megazero.ops.squared_relu import SQUARED_RELU
from megazero.ops.swiglu import SWIGLU
from megazero.ops.to_fp8 import TO_FP8
from megazero.ops.top_k import TOP_K
from megazero.ops.update import UPDATE

__all__ = ["Operator", "operators"]


def operators() -> tuple[Operator[Any], ...]:
    """Every operator with a choice of implementations, in alphabetical order."""
    return (
        ADD_LAYER_NORM,
        ADD_RMS_NORM,
        ATTENTION,
        BIAS_DROPOUT_ADD,
        BIAS_GELU,
        CHOSEN_ROWS,
        CODED_LINEAR,
        CROSS_ENTROPY,
        DEQUANTIZE,
        EMBEDDING,
        GATE,
        GATED,
        GATHERED_SUM,
        GRADIENT_SUM,
        GROUPED_LINEAR,
        GROUPED_OUTER,
        KEPT_COLUMNS,
        KL_DIVERGENCE,
        LAMB_MOVE,
        LAMB_NORMS,
        LAYER_NORM,
        LINEAR_CROSS_ENTROPY,
        PERMUTE,
        QUANTIZE,
        RMS_NORM,
        ROTARY,
        SCALED_SOFTMAX,
        SORT_BY_EXPERT,
        SQUARE_SUM,
        SQUARED_RELU,
        SWIGLU,
        TO_FP8,
        TOP_K,
        UPDATE,
    )
