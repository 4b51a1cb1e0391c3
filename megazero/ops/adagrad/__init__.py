"""Adagrad (Duchi et al. 2011): one in-place step of a flat tensor."""

from megazero.ops.adagrad.front import ADAGRAD, adagrad_step
from megazero.ops.adagrad.reference import adagrad_reference

__all__ = ["ADAGRAD", "adagrad_reference", "adagrad_step"]
