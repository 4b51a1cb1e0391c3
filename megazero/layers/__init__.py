"""layers: the building blocks of the models, sliced over the tensor-parallel ranks.

Start with `transformer.py`; `linear.py` and `embedding.py` hold the sliced weights, `collectives.py` has the
collectives that autograd sees, and `initialize.py` makes the initial weights.
"""

from megazero.layers.attention import SelfAttention
from megazero.layers.collectives import gather_for_parts, gather_sequence, share_for_parts
from megazero.layers.compiled import compile_layers
from megazero.layers.cores import CachedCore, KeyValueStore, LocalCore, core_of
from megazero.layers.embedding import Embedding, output_weight, vocabulary_spec
from megazero.layers.fp8 import Fp8State, use_fp8
from megazero.layers.graphed import CudaGraphs, graph_layers
from megazero.layers.initialize import initialize, initialize_parameters
from megazero.layers.inputs import NOTHING_SKIPPED, Attends, AttentionCore, Deferred, LayerInputs, Skipping
from megazero.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    column_linear,
    residual_std,
)
from megazero.layers.mlp import MLP, MLPResult, activated
from megazero.layers.norm import Norm
from megazero.layers.placement import Placement
from megazero.layers.recompute import InputKeeping, recompute_units, run_layers
from megazero.layers.rows import Rows, Spread
from megazero.layers.sums import Sums
from megazero.layers.transformer import TransformerLayer

__all__ = [
    "MLP",
    "NOTHING_SKIPPED",
    "Attends",
    "AttentionCore",
    "CachedCore",
    "ColumnParallelLinear",
    "CudaGraphs",
    "Deferred",
    "Embedding",
    "Fp8State",
    "InputKeeping",
    "KeyValueStore",
    "LayerInputs",
    "LocalCore",
    "MLPResult",
    "Norm",
    "Placement",
    "ReplicatedLinear",
    "RowParallelLinear",
    "Rows",
    "SelfAttention",
    "Skipping",
    "Spread",
    "Sums",
    "TransformerLayer",
    "activated",
    "column_linear",
    "compile_layers",
    "core_of",
    "gather_for_parts",
    "gather_sequence",
    "graph_layers",
    "initialize",
    "initialize_parameters",
    "output_weight",
    "recompute_units",
    "residual_std",
    "run_layers",
    "share_for_parts",
    "use_fp8",
    "vocabulary_spec",
]
