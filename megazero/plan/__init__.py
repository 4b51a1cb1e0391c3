"""A training on paper: its needs, its time and its traffic, worked out from its own code on tensors without content."""
