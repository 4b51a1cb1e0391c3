"""GELU of x + bias (Hendrycks & Gimpel 2016)."""

from megazero.ops.bias_gelu.front import BIAS_GELU, bias_gelu

__all__ = ["BIAS_GELU", "bias_gelu"]
