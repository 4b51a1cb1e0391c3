"""Looking at data: what a blend would give a training, what is in datasets, and whether they are whole."""
