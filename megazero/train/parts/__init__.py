"""parts: from a configuration to a model: the table of families, the vocabulary, the chunks of this rank."""
