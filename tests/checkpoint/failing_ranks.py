"""Jobs of two Gloo ranks whose second rank cannot write two checkpoints: ``failing_ranks.py FOLDER``.

FOLDER/<job>/rank<N>.txt has what each rank said, FOLDER/results.json how each ended.
"""

from __future__ import annotations

import errno
import json
import re
import sys
from pathlib import Path

import torch

from proofs.kill_job import Job
from tests.checkpoint.faulty_disk import FaultyDisk, Full

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --mock-data "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --train-iters 9 --save-interval 2 --eval-iters 0"
)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    results = {}
    for way, flags in (("in_line", []), ("background", ["--async-save"])):
        place = folder / way
        place.mkdir()
        # Room for a little of the checkpoints of iteration 4 and of the last one.
        full = Full(errno.ENOSPC, lambda change: re.search("iter_000000[49]", str(change.path)), room=100)
        argv = [*FLAGS.split(), "--save", str(place / "run"), *flags]
        results[way] = Job(argv, place, 0, [None, FaultyDisk(full)]).run()
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
