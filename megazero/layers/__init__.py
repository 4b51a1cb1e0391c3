"""layers: the building blocks of the models, sliced over the tensor-parallel ranks.

Start with `transformer.py`; `linear.py` and `embedding.py` hold the sliced weights, `collectives.py` has the
collectives that autograd sees, and `initialize.py` makes the initial weights.
"""

from megazero.layers.initialize import initialize

__all__ = ["initialize"]
