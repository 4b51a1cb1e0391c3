"""Data: from token ids on disk to the arrays of a training step.

What is here, bottom up:

- `indexed/`: Megatron's `.bin`/`.idx` files, checked when read, whole or absent when written (`open_indexed`,
  `IndexedDatasetWriter`).
- `index_build`: the order of samples, Megatron-Core's own, as numpy references and compiled twins (`native`).
- `cache`: index arrays kept between runs, keyed by content. `splits`: split strings.
- `gpt_dataset`, `bert/`, `blended`: samples and mixtures of them, one at a time or in batches.
- `labelled/`: samples with labels, read from files as published, and the order of epochs.
- `token_ids`: that ids are of the vocabulary, looked at where a batch is made.
- `sources`: the files under a built dataset: whether they change, and what is in them.
- `sampler`, `shuffle`: which samples a rank takes next, a pure function of the samples consumed.
- `build`: `build_datasets(request)` puts all of it together; `gpt_datasets` and `bert_datasets` do so for a
  configuration.
- `tokenizers/`: text to ids and back.
"""
