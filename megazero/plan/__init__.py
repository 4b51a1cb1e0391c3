"""A training on paper: what it needs, takes and moves, found by its own code on the meta device."""
