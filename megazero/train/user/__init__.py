"""user: `megazero.initialize`, the engine for a model of the user's own, by DeepSpeed's JSON and names.

Start with `initialize.py` and `engine.py`; `config.py` reads the JSON, `optimizer.py`, `rules.py` and
`schedules.py` stand between torch's optimizers and ours, `parallel.py` lays a foreign module out in buckets,
`checkpoint.py` and `data.py` save and feed it, `report.py` says how it goes.
"""
