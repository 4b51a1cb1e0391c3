"""layers: the building blocks of the models, sliced over the tensor-parallel ranks.

Start with `transformer.py`; `linear.py` and `embedding.py` hold the sliced weights, `collectives.py` the
communications that autograd sees, `initialize.py` where the initial weights come from.
"""

from megazero.layers.embedding import Embedding, vocabulary_spec
from megazero.layers.initialize import initialize, initialize_parameters
from megazero.layers.inputs import Deferred, KeyValueStore, LayerInputs
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear, column_linear
from megazero.layers.norm import Norm
from megazero.layers.placement import Placement
from megazero.layers.recompute import InputKeeping, recompute_units, run_layers
from megazero.layers.transformer import TransformerLayer

__all__ = [
    "ColumnParallelLinear",
    "Deferred",
    "Embedding",
    "InputKeeping",
    "KeyValueStore",
    "LayerInputs",
    "Norm",
    "Placement",
    "RowParallelLinear",
    "TransformerLayer",
    "column_linear",
    "initialize",
    "initialize_parameters",
    "recompute_units",
    "run_layers",
    "vocabulary_spec",
]
