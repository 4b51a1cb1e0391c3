"""hybrid: models whose layers are one mixer or one MLP each: their settings, and the rules on them."""
