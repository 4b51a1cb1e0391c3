"""checkpoint: logical tensors, stored as the shards that ranks own and read in whatever parts a rank needs.

`box` and `part` say what is where, `shards` what a rank holds. `saver` writes a checkpoint over all ranks
(`writer` its files), `reader` reads it; `tensor_file`, `blocks` and `disk` are the storage below, `manifest`
and `folder` what makes files a checkpoint and folders a run's.
"""
