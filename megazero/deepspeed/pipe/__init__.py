"""pipe: DeepSpeed's pipeline interface: a model as a sequence of layers, split into pipeline stages.

Start with `model.py` (`PipelineModule`; `module.py` and `stage.py` are its bases) and `engine.py`
(`train_batch`). `topology.py` and `grid.py` have the coordinates of ranks. `feed.py` reads micro-batches and
`runner.py` runs them: `chunk.py` adapts a stage to our executor, `messages.py` packs the tensors between
stages into one, and `ties.py` sums the gradients of tied weights over stages. `files.py` writes a file per
layer, and `schedule.py` describes our schedules by DeepSpeed's instructions.
"""
