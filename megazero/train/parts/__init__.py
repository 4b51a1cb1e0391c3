"""parts: what a configuration's model consists of: its family, vocabulary, and this rank's chunks."""
