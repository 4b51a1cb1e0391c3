"""Settings and rules of a model of an encoder and a decoder."""
