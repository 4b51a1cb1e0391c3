"""inference: text from a trained model.

Start with `generate.py` (tokens in, tokens out); `sampling.py` chooses the next token, `cache.py` keeps
earlier keys and values, `staged.py` runs a model over pipeline stages, `text.py` adds the tokenizer.
`fill.py` predicts masked tokens, `text_to_text.py` runs an encoder and a decoder. `sample_loss.py` and
`position_loss.py` measure losses.
"""

from megazero.inference.generate import generate

__all__ = ["generate"]
