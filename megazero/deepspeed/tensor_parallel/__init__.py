"""tensor_parallel: slicing a user's model over tensor-parallel ranks, by rules for its family."""
