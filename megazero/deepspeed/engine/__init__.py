"""engine: the engine that `initialize` returns: a module of any kind with its parts.

`engine.py` puts the parts together: `gradients.py` has forwards and backwards, `updates.py` steps,
`batches.py` reads data, `keeper.py` keeps checkpoints, `queries.py` answers a script; `state.py` is what they
share.
"""
