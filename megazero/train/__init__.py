"""train: from a configuration to a trained model.

`assemble.py` puts all parts together, and `loop.py` runs steps, evaluations and saves. The rooms import each
other downwards only: `finetuning`, `guards`, `resume`, `observe`, `parts`, `step`.
"""
