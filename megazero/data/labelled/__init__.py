"""labelled: samples with labels, from files as published to the arrays of a training step.

`files` reads TSV, JSONL and RACE's folders, `encode` makes token ids of texts, and `dataset` holds them and
orders the epochs.
"""
