"""resume: what a run saves, which checkpoint a run continues from, and how it is loaded."""
