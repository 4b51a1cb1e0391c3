"""indexed: Megatron's `.bin`/`.idx` datasets, checked when read, whole or absent when written.

`format` is the layout of the bytes, and `checksum` an optional sidecar that shows damage beyond it, which
`sums` writes later; `reader` opens a dataset, `guard` watches over one that is trained on, and `writer` makes
one.
"""
