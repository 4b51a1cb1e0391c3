"""sparse: block-sparse attention, DeepSpeed's `ops.sparse_attention`, which it has removed."""
