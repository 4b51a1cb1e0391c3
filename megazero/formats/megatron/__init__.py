"""megatron: reads checkpoints of Megatron-LM and Megatron-DeepSpeed, and writes Megatron-LM's.

`folder` finds the files, `stages`, `dist_stages` and `universal` open them, `inventory` lists their tensors.
`dialects` and `names` are the tables of tensors, `settings` that of arguments. `reader` is the `Source`, from
which `convert` writes a megazero checkpoint; `export` goes the other way.
"""

from megazero.formats.megatron.convert import import_megatron
from megazero.formats.megatron.reader import ImportOptions, MegatronReader

__all__ = ["ImportOptions", "MegatronReader", "import_megatron"]
