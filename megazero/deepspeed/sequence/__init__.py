"""sequence: sequence parallelism (Ulysses) for a script's own models and for those of transformers."""
