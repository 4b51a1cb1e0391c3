"""What a router's logits make of the chosen experts: their weights, and the probabilities of all."""

from megazero.ops.gate.front import GATE, gate
from megazero.ops.gate.reference import Gating

__all__ = ["GATE", "Gating", "gate"]
