"""schedules: learning rates, lengths of a curriculum, and layers to drop, by the number of the step."""
