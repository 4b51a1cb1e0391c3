"""SGD with heavy-ball momentum (Polyak 1964): one in-place step of a flat tensor."""

from megazero.ops.sgd.front import SGD, sgd_step
from megazero.ops.sgd.reference import sgd_reference

__all__ = ["SGD", "sgd_reference", "sgd_step"]
