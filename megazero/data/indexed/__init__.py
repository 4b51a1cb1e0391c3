"""indexed: Megatron's `.bin`/`.idx` datasets, checked when read, whole or absent when written.

- `format`: the layout of the bytes.
- `checksum`: an optional sidecar that reveals damage to the tokens.
- `reader`: opens a dataset, and adds a sidecar to it. `guard`: checks the files while they are read.
- `writer`: writes a dataset.
"""
