"""megatron: checkpoints of Megatron-LM and Megatron-DeepSpeed as a source of weights; import only.

`pickles` reads files without running them, `folder` finds them, `stages` opens them, `inventory` lists what
they hold. `names` and `settings` are the tables of what tensors and arguments mean, `reader` is the `Source`,
`convert` writes a checkpoint from it.
"""

from megazero.formats.megatron.convert import import_megatron
from megazero.formats.megatron.reader import ImportOptions, MegatronReader

__all__ = ["ImportOptions", "MegatronReader", "import_megatron"]
