"""AdamW (Loshchilov & Hutter 2019): one in-place step over lists of tensors."""

from megazero.ops.adam.front import ADAM, adam_step
from megazero.ops.adam.reference import adam_reference

__all__ = ["ADAM", "adam_reference", "adam_step"]
