"""train: from a configuration to a trained model.

`assemble.py` puts a run together, `build.py` builds its engine, and `loop.py` runs it. Folders import only
from those after them: `finetuning`, `guards`, `resume`, `observe`, `parts`, `step`.
"""
