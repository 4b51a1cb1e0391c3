"""comm_hooks: how a bucket's weights and gradient sums travel between its replicas.

`comm_hook.py` defines a communication hook; `exact.py` sends everything as it is. The others change one part
of the hook that they wrap: `weights.py` and `gradients.py` send codes (qwZ and qgZ of ZeRO++), `node.py`
gathers from the node (hpZ). `choose.py` is the table of which bucket gets which.
"""

from megazero.zero.comm_hooks.choose import choose_comm_hook
from megazero.zero.comm_hooks.comm_hook import CommHook, Reduction, WrappedCommHook
from megazero.zero.comm_hooks.exact import ExactCommHook
from megazero.zero.comm_hooks.gradients import QuantizedGradients
from megazero.zero.comm_hooks.node import NodeCommHook
from megazero.zero.comm_hooks.weights import QuantizedWeights

__all__ = [
    "CommHook",
    "ExactCommHook",
    "NodeCommHook",
    "QuantizedGradients",
    "QuantizedWeights",
    "Reduction",
    "WrappedCommHook",
    "choose_comm_hook",
]
