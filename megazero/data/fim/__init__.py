"""Fill-in-the-middle (`--fim-data`).

`rearrange` says what becomes of a document; `dataset` has the samples of rearranged documents.
"""
