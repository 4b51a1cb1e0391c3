"""BERT's training samples: sentences packed, cut into two segments and masked, in Megatron-Core's order.

- `word_pieces`: what masking needs to know of a vocabulary.
- `sample_map`: which sentences make which sample. `mersenne`: the generator that shuffles it.
- `sample`, `masking`: from the sentences of a sample to its arrays.
- `dataset`: samples of one split of one dataset. `mock`: random ones, for runs without data. `builder`: both,
  for the splits of a run.
"""

from __future__ import annotations
