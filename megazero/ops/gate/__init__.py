"""The gate of a router: the weights of the chosen experts, and the probabilities of all."""

from megazero.ops.gate.front import GATE, gate
from megazero.ops.gate.reference import Gating

__all__ = ["GATE", "Gating", "gate"]
