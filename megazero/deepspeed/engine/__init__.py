"""engine: the engine that `initialize` returns, composed of parts.

`engine.py` composes them: `gradients.py` runs forward and backward, `updates.py` steps, `batches.py` reads
data, `checkpoint_calls.py` saves and loads, `queries.py` and `getters.py` answer a script. They share
`state.py`. `assemble.py` builds an engine on a model, and `attachment.py` takes it off again.
"""
