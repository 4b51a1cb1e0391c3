"""spec: what a model is made of, layer by layer.

`resolve.model_spec` reads the settings of a run once, into a `ModelSpec` (`model.py`) whose layers have the
parts of `parts.py` and `experts.py`. Code that builds, counts, names or converts a model reads it alone.
"""
