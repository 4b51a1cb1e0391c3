"""data_efficiency: an analyzer that measures the difficulty of samples, and curricula that train by it."""
