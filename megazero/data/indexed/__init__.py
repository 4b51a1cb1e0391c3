"""indexed: Megatron's `.bin`/`.idx` datasets, checked when read, whole or absent when written.

- `format`: the layout of the bytes.
- `checksum`: an optional sidecar that reveals damage to the tokens. `sums`: adds one to a dataset.
- `reader`: opens a dataset. `guard`: checks its files while they are read. `writer`: writes a dataset.
"""
