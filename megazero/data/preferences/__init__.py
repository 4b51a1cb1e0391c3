"""preferences: pairs of answers to one prompt, of which one was chosen and one rejected."""
