"""An encoder, and a decoder that attends to what it makes of another text: T5 (Raffel et al. 2020).

`batch.py` has micro-batches of pairs of texts, `bias.py` relative biases, `layers.py` attention and the
decoder's layer, and `t5.py` the model.
"""
