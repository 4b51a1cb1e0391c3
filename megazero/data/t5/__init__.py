"""T5's training samples: sentences of which spans are cut out, in Megatron-Core's order, and pairs of texts.

- `vocabulary`: the special ids and sentinels of a tokenizer.
- `spans`: from the tokens of a sample to its arrays.
- `dataset`: samples of one split of one indexed dataset, and random ones for runs without data.
- `pairs`: pairs of texts from files, for fine-tuning.
"""
