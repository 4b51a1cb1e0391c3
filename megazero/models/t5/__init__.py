"""T5: an encoder and a decoder that attends to what the encoder makes of another text (Raffel et al. 2020).

`batch.py` has its micro-batches, `bias.py` the relative biases, `layers.py` attention and the decoder's
layer, and `model.py` all of it.
"""
