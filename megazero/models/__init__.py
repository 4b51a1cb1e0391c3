"""models: `gpt.py` is GPT in all its shapes (Llama, DeepSeek, ...), `bert.py` BERT, `pairs/` T5.

`trunk.py` has the embedding and the layers, which GPT and BERT share; `layer.py` builds one layer.
`classifier.py` is a classifier on either trunk, `distilled.py` a GPT that learns from a teacher, and
`sample_losses.py` computes the loss of each sample. `chunk.py` is the trainer's interface to a model,
`language_model.py` inference's. `batch.py`, `bert_batch.py` and `classifier_batch.py` define micro-batches.
"""
