"""schedules: learning rates, sequence lengths of a curriculum, and shares of layers to keep, by step."""
