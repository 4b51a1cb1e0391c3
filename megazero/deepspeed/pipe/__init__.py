"""pipe: DeepSpeed's pipeline interface: a model as a row of layers, cut into the stages of a pipeline.

Start with `model.py` (`module.py` and `stage.py` build it) and `engine.py` (`train_batch`). `topology.py` and
`grid.py` say where a rank sits. `feed.py` reads micro-batches and `runner.py` runs them: `chunk.py` shows a
stage to our executor, `messages.py` makes one tensor of what stages send to each other, and `ties.py` sums
the gradients of weights that several stages hold. `build.py` puts an engine together, `files.py` writes a
file for each layer, and `schedule.py` describes our schedules in DeepSpeed's words.
"""
