"""plan: the memory, traffic and time of a training, found by running its code on the meta device."""
