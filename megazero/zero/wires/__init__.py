"""wires: how a bucket's weights and gradient sums travel between its replicas.

`wire.py` says what a wire is; `exact.py` sends everything as it is. The others change one part of the wire
that they are put around: `weights.py` and `gradients.py` send codes (qwZ and qgZ of ZeRO++), `node.py`
gathers from the node (hpZ). `choose.py` is the table of which bucket gets which.
"""

from megazero.zero.wires.choose import choose_wire
from megazero.zero.wires.exact import ExactWire
from megazero.zero.wires.gradients import QuantizedGradients
from megazero.zero.wires.node import NodeWire
from megazero.zero.wires.weights import QuantizedWeights
from megazero.zero.wires.wire import Reduction, Wire, WrappedWire

__all__ = [
    "ExactWire",
    "NodeWire",
    "QuantizedGradients",
    "QuantizedWeights",
    "Reduction",
    "Wire",
    "WrappedWire",
    "choose_wire",
]
