"""sequence: sequences that ranks share, for models of a script's own (`layer`) and of transformers."""
