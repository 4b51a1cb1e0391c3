"""labelled: samples with labels, from published files to the arrays of a training step.

`files` reads TSV, JSONL and RACE's folders, `encode` turns texts into token ids, and `dataset` has the
encoded samples and the order of epochs.
"""
