"""hf: models of Hugging Face transformers, read as logical tensors and written from them.

`architecture` defines the tables that describe one, in the notation of `checkpoint/naming.py`, and each
family has a module of tables; `architectures` lists all. `reader` presents a folder as a `Source`, `writer`
makes a folder from any `Source`, `convert` connects both to checkpoints. Nothing here imports transformers or
unpickles.
"""

from megazero.formats.hf.architecture import Architecture
from megazero.formats.hf.architectures import ARCHITECTURES, DECODERS, ENCODERS
from megazero.formats.hf.config_json import Description, TokenIds
from megazero.formats.hf.convert import Imported, convert_from_hf, convert_to_hf
from megazero.formats.hf.reader import HFReader
from megazero.formats.hf.tokenizer_files import TokenizerFiles, tokenizer_files, tokenizer_settings
from megazero.formats.hf.writer import Exported, ModelFiles, write_hf

__all__ = [
    "ARCHITECTURES",
    "DECODERS",
    "ENCODERS",
    "Architecture",
    "Description",
    "Exported",
    "HFReader",
    "Imported",
    "ModelFiles",
    "TokenIds",
    "TokenizerFiles",
    "convert_from_hf",
    "convert_to_hf",
    "tokenizer_files",
    "tokenizer_settings",
    "write_hf",
]
