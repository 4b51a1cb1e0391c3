"""Slicing a given model over tensor-parallel ranks, by rules for its family."""
