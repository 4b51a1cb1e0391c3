"""train: from a configuration to a trained model.

`assemble.py` puts all parts together; `loop.py` runs steps, evaluations and saves; `engine.py` makes one
step; `families.py` lists the kinds of models; `feed.py` supplies the samples; `monitors/` report progress.
"""
