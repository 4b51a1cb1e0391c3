"""hf: models of Hugging Face transformers, read as logical tensors and written from them.

`rule` is the notation that says how a tensor of theirs and one of ours hold the same numbers, `family` what
there is to know of an architecture; `gpt2` and `llama` are two. `reader` sees a folder as a `Source`,
`writer` makes a folder of any `Source`; `convert` joins both to checkpoints. Nothing here imports
transformers, and nothing unpickles.
"""

from megazero.checkpoint.hf.config_json import FAMILIES, TokenIds
from megazero.checkpoint.hf.convert import Imported, convert_from_hf, convert_to_hf
from megazero.checkpoint.hf.reader import HFReader
from megazero.checkpoint.hf.tokenizer_files import TokenizerFiles, tokenizer_files, tokenizer_settings
from megazero.checkpoint.hf.writer import Exported, Extras, write_hf

__all__ = [
    "FAMILIES",
    "Exported",
    "Extras",
    "HFReader",
    "Imported",
    "TokenIds",
    "TokenizerFiles",
    "convert_from_hf",
    "convert_to_hf",
    "tokenizer_files",
    "tokenizer_settings",
    "write_hf",
]
