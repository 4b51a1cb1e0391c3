"""SwiGLU, the gated activation silu(gate) * up (Shazeer 2020)."""

from megazero.ops.swiglu.front import SWIGLU, swiglu

__all__ = ["SWIGLU", "swiglu"]
