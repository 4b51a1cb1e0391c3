"""corpora: make the texts of the quickstart, the guides and the ablations."""
