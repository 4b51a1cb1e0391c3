"""Attention over sequences whose keys lie on several ranks (context parallelism)."""
