"""pipe: DeepSpeed's pipeline interface: a model as a row of layers, cut into the stages of a pipeline.

Start with `module.py` (the model) and `engine.py` (`train_batch`). `split.py` says which layers a stage gets,
`topology.py` and `grid.py` where a rank sits. `chunk.py` shows a stage to our executor, `messages.py` makes
one tensor of what stages send to each other, and `ties.py` sums the gradients of weights that several stages
hold. `build.py` puts an engine together, `files.py` writes a file for each layer, and `schedule.py`
describes our schedules in DeepSpeed's words.
"""
