"""train: from a configuration to a trained model.

`assemble.py` puts a run together, `build.py` its engine, and `loop.py` runs it. The rooms import each other
downwards only: `finetuning`, `guards`, `resume`, `observe`, `parts`, `step`.
"""
