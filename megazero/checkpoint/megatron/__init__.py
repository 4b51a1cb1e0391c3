"""megatron: checkpoints of Megatron-LM and Megatron-DeepSpeed as a source of weights; import only.

`pickles` reads files without running them, `folder` and `stages` say which there are and open them, `names` and
`settings` are the tables of what their tensors and arguments mean; `reader` is the `Source`, `command` the command.
"""

from megazero.checkpoint.megatron.command import import_megatron, main_import_megatron
from megazero.checkpoint.megatron.reader import ImportOptions, MegatronReader

__all__ = ["ImportOptions", "MegatronReader", "import_megatron", "main_import_megatron"]
