"""Lion (Chen et al. 2023): one in-place step of a flat tensor."""

from megazero.ops.lion.front import LION, lion_step
from megazero.ops.lion.reference import lion_reference

__all__ = ["LION", "lion_reference", "lion_step"]
