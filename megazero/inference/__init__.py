"""inference: text from a trained model.

Start with `generate.py` (tokens in, tokens out); `sampling.py` decides the next token, `cache.py` keeps
earlier keys and values, `staged.py` runs a model over pipeline stages, `text.py` adds the tokenizer.
`fill.py` is for models that restore masked tokens.
"""

from megazero.inference.generate import generate

__all__ = ["generate"]
