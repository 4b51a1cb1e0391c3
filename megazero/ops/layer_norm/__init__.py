"""Layer normalization over the last dim (Ba, Kiros & Hinton 2016)."""

from megazero.ops.layer_norm.front import LAYER_NORM, layer_norm

__all__ = ["LAYER_NORM", "layer_norm"]
