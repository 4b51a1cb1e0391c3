"""GPT's training samples of whole documents (`--pack best-fit`).

`packing` decides which documents share a sample; `dataset` has the samples of one split.
"""
