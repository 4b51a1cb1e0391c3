"""models: each of them short enough to read in one go. `gpt.py` is GPT in all its shapes, `bert.py` BERT.

`classifier.py` puts a classifier on either, `distilled.py` a teacher beside a GPT, and `sample_losses.py`
computes the loss of each sample. `trunk.py` has the embedding and the layers, which all models share,
and `layer.py` says what a layer consists of.
`chunk.py` says what the trainer needs from a model, `language_model.py` what inference needs. `batch.py`,
`bert_batch.py` and `classifier_batch.py` define micro-batches, and `flops.py` counts what blocks cost.
"""
