"""train: from a configuration to a trained model.

`assemble.py` is where all parts meet; `loop.py` runs steps, evaluations and saves;
`engine.py` makes one step; `feed.py` brings the samples; `monitors/` tell the world.
"""
