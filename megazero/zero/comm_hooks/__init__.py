"""comm_hooks: how a bucket's weights and gradient sums travel between its replicas.

`comm_hook.py` defines a communication hook; `exact.py` sends everything as it is. The others change one part
of the hook that they wrap: `weights.py` and `gradients.py` send codes (qwZ and qgZ of ZeRO++), `node.py`
gathers from the node (hpZ). `choose.py` is the table of which bucket gets which.
"""
