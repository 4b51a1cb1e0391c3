"""inference: text from a trained model.

Start with `generate.py` (tokens in, tokens out); `sampling.py` chooses the next token, `cache.py` keeps
earlier keys and values, `staged.py` runs a model over pipeline stages, `text.py` adds the tokenizer.
`fill.py` predicts masked tokens, `text_to_text.py` runs an encoder and a decoder. `sample_loss.py` and
`position_loss.py` measure losses. `harness_model` makes a model that lm-evaluation-harness scores.
"""

from typing import Any

from megazero.door import through_door
from megazero.inference.generate import generate

__all__ = ["generate", "harness_model"]


def __getattr__(name: str) -> Any:
    return through_door(__name__, name, "megazero.harness.lm", "harness_model")
