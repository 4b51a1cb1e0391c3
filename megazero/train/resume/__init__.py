"""resume: state that lasts: what a run saves, and which checkpoint one continues from, and how."""
