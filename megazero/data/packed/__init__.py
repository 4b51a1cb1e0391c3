"""GPT's training samples of whole documents (`--pack best-fit`).

- `packing`: which documents share a sample.
- `dataset`: samples of one split of one indexed dataset.
"""
