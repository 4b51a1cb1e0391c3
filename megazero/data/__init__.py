"""Data: from token ids on disk to the arrays of a training step.

Bottom up:

- `tokenizers/`: text to ids and back.
- `indexed/`: Megatron's `.bin`/`.idx` files, checked when read, whole or absent when written (`open_indexed`,
  `IndexedDatasetWriter`).
- `index_build`: the order of samples, Megatron-Core's own, as numpy references and compiled twins (`native`).
- `cache`: index arrays kept between runs, keyed by content. `splits`: split strings.
- `gpt_dataset`, `packed/`, `bert/`, `t5/`, `mock`, `blended`: samples and mixtures of them. `labelled/`:
  samples with labels.
- `build`: `build_datasets(request)` puts these together; `from_config` does so for a run's configuration.
- `sources`: the files inside a built dataset. `range_checks`: checks of sample numbers and token ids.
- `sampler`, `shuffle`: which samples a rank takes next, a pure function of the samples consumed.
"""
