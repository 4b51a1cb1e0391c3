"""Text to token ids and back. Start at `build_tokenizer` (build.py); `fast.py` is the fast path.

Importing this package loads no tokenizer library; each kind imports its own when it is built.
"""

from megazero.data.tokenizers.base import TokenBatch, Tokenizer, is_failure
from megazero.data.tokenizers.build import TOKENIZER_KINDS, TokenizerSpec, build_tokenizer
from megazero.data.tokenizers.fast import FastChoice, FastEncoder, first_difference, try_fast

__all__ = [
    "TOKENIZER_KINDS",
    "FastChoice",
    "FastEncoder",
    "TokenBatch",
    "Tokenizer",
    "TokenizerSpec",
    "build_tokenizer",
    "first_difference",
    "is_failure",
    "try_fast",
]
