"""Root-mean-square normalization over the last dim (Zhang & Sennrich 2019)."""

from megazero.ops.rms_norm.front import RMS_NORM, rms_norm

__all__ = ["RMS_NORM", "rms_norm"]
