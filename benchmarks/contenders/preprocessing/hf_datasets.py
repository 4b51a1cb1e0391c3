"""`datasets`, `tokenizers`: `load_dataset`, then `map(batched=True, num_proc=)`, which writes Arrow files."""

from __future__ import annotations

import os
import sys
from functools import cache

import tokenizers
from datasets import Features, Sequence, Value, load_dataset


@cache
def tokenizer(path: str) -> tokenizers.Tokenizer:
    """The tokenizer of this process."""
    return tokenizers.Tokenizer.from_file(path)


def encode(rows: dict[str, list[str]], path: str) -> dict[str, list[list[int]]]:
    """The ids of a batch of rows, each with the end of text."""
    backend = tokenizer(path)
    end = backend.token_to_id("<|endoftext|>")
    encodings = backend.encode_batch_fast(rows["text"], add_special_tokens=False)
    return {"input_ids": [[*encoding.ids, end] for encoding in encodings if encoding.ids]}


def main(source: str, target: str, path: str, workers: str) -> None:
    """Write the Arrow files."""
    os.makedirs(target)
    texts = load_dataset("json", data_files=source, split="train", cache_dir=f"{target}/texts")
    count = int(workers)
    texts.map(
        encode,
        batched=True,
        fn_kwargs={"path": path},
        num_proc=None if count == 1 else count,
        remove_columns=["text"],
        features=Features({"input_ids": Sequence(Value("uint16"))}),
        cache_file_name=f"{target}/tokens.arrow",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
