"""Layer normalization over the last dim (Ba, Kiros & Hinton 2016), also of a sum."""

from megazero.ops.layer_norm.added import ADD_LAYER_NORM, add_layer_norm
from megazero.ops.layer_norm.front import LAYER_NORM, layer_norm

__all__ = ["ADD_LAYER_NORM", "LAYER_NORM", "add_layer_norm", "layer_norm"]
