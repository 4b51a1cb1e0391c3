"""datatrove: `JsonlReader` and `DocumentTokenizer` under a `LocalPipelineExecutor`, without its shuffle.

A task takes whole files, so INPUT is a folder with a file for each worker. It writes `.ds` and `.ds.index`.
"""

from __future__ import annotations

import sys

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer


def main(source: str, target: str, path: str, workers: str) -> None:
    """Write the token files, one for each file of the input."""
    steps = [
        JsonlReader(source, glob_pattern="*.jsonl"),
        DocumentTokenizer(target, path, eos_token="<|endoftext|>", shuffle_documents=False),
    ]
    count = int(workers)
    LocalPipelineExecutor(steps, tasks=count, workers=count, logging_dir=f"{target}/logs").run()


if __name__ == "__main__":
    main(*sys.argv[1:])
