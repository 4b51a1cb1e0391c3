"""Root-mean-square normalization over the last dim (Zhang & Sennrich 2019), also of a sum."""

from megazero.ops.rms_norm.added import ADD_RMS_NORM, add_rms_norm
from megazero.ops.rms_norm.front import RMS_NORM, rms_norm

__all__ = ["ADD_RMS_NORM", "RMS_NORM", "add_rms_norm", "rms_norm"]
