"""BERT's training samples: sentences packed, cut into two segments and masked, in Megatron-Core's order.

- `word_pieces`: the vocabulary, as masking reads it.
- `sample_map`: which sentences make which sample.
- `sample`, `masking`: from the sentences of a sample to its arrays.
- `dataset`: samples of one split of one dataset. `mock`: random samples, for runs without data.
"""
