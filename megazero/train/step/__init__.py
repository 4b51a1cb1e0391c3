"""step: one training step: its samples, its losses, the engine that makes it, and the progress after it."""
