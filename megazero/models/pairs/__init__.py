"""Encoder-decoder models: T5 (Raffel et al. 2020).

`batch.py` has micro-batches of pairs of texts, `bias.py` relative position biases, `layers.py` the layers of
encoder and decoder, and `t5.py` the model.
"""
