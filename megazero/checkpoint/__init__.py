"""checkpoint: logical tensors, written as each rank's shards and read in any layout.

`box` and `part` describe parts of tensors, `shards` the parts that a rank holds. `saver` writes a checkpoint
from all ranks, `reader` reads it. Below are `tensor_file`, `blocks` and `disk`; `manifest` describes one
checkpoint, `folder` a run's folder of them.
"""
