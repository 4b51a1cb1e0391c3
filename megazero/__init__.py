"""megazero: 3D-parallel pretraining of GPT and BERT, the same numbers on any layout."""

__version__ = "0.1.0"
