"""indexed: Megatron's `.bin`/`.idx` datasets, checked when read, whole or absent when written.

`format` is the layout of the bytes, and `checksum` an optional sidecar that shows damage beyond it; `reader`
opens a dataset and `writer` makes one.
"""
