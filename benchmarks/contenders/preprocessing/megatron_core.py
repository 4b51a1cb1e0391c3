"""megatron-core's `IndexedDatasetBuilder`, fed as Megatron-LM's `preprocess_data.py` does: lines of a file go
to a pool in pieces of 32, and the first process writes what comes back. It writes `.bin` and `.idx`.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from functools import cache

import numpy as np
import tokenizers
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


@cache
def tokenizer(path: str) -> tokenizers.Tokenizer:
    """The tokenizer of this process."""
    return tokenizers.Tokenizer.from_file(path)


class Encoder:
    """Encodes a line as Megatron's encoder does: its ids with the end of text, and their lengths."""

    def __init__(self, path: str):
        self.path = path

    def __call__(self, line: str) -> tuple[list[int], list[int]]:
        """The ids of the line's document."""
        backend = tokenizer(self.path)
        ids = backend.encode(json.loads(line)["text"], add_special_tokens=False).ids
        if ids:
            ids.append(backend.token_to_id("<|endoftext|>"))
        return ids, [len(ids)]


def main(source: str, target: str, path: str, workers: str) -> None:
    """Write the dataset."""
    with open(source, encoding="utf-8") as lines, multiprocessing.Pool(int(workers)) as pool:
        builder = IndexedDatasetBuilder(f"{target}.bin", dtype=np.uint16)
        for ids, lengths in pool.imap(Encoder(path), lines, 32):
            if ids:
                builder.add_document(torch.IntTensor(ids), lengths)
        builder.finalize(f"{target}.idx")


if __name__ == "__main__":
    main(*sys.argv[1:])
