"""corpora: tools that make the text of the quickstart, the guides and the ablations."""
