"""Data efficiency: how hard each sample is, and which samples a step trains on because of it."""
