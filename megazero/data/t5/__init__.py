"""T5's training samples: sentences of which spans are cut out, in Megatron-Core's order, and pairs of texts.

- `vocabulary`: what cutting spans out needs to know of a tokenizer.
- `spans`: from the tokens of a sample to its arrays.
- `dataset`: samples of one split of one indexed dataset. `mock`: random ones, for runs without data.
- `pairs`: pairs of texts from files, for fine-tuning.
- `builder`: all of these, for the splits of a run.
"""
