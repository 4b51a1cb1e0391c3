"""rows: one row for each key of a DeepSpeed JSON, by subject."""
