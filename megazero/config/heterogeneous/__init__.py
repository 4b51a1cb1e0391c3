"""heterogeneous: models whose layers have widths of their own: their settings, and the rules on them."""
