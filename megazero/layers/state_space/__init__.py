"""state_space: Mamba-2 mixers, and the layers of hybrid models, each of which is one mixer or one MLP.

`mixer.py` is the mixer, `scan.py` and `convolution.py` what it computes, `layer.py` a layer around one part.
"""
